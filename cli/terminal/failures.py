"""The message and exit code of a failed command, which only this file determines."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass

import typer

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.parameters import nearest_name

EXIT_USER_ERROR = 2
EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143

_LONGEST_SENTENCE = 4000
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SURROUNDINGS = {
    errno.EACCES,
    errno.EEXIST,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.EMFILE,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
# Extras of pyproject.toml by the packages that they install, under their import names. The command
# line itself needs pydantic, which typer installs.
EXTRA_OF_PACKAGE = {
    "PIL": "build",
    "certifi": "serve",
    "cryptography": "sign",
    "cuda": "cuda",
    "filelock": "build",
    "fontTools": "build",
    "google": "build",
    "h11": "serve",
    "httptools": "serve",
    "httpx": "serve",
    "idna": "serve",
    "llguidance": "serve",
    "matplotlib": "build",
    "msgspec": "events",
    "nvidia": "cuda",
    "onnx": "build",
    "onnx_graphsurgeon": "build",
    "onnx_ir": "build",
    "onnxruntime": "cpu",
    "onnxscript": "build",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "ray": "ray",
    "starlette": "serve",
    "tensorrt": "tensorrt",
    "tensorrt_rtx": "tensorrt-rtx",
    "torch": "build",
    "tqdm": "build",
    "transformers": "build",
    "uvicorn": "serve",
    "uvloop": "serve",
    "zmq": "events",
}
_SOURCES = "where specbuild's sources are"


class TerminatedError(BaseException):
    """SIGTERM requested the end of the process."""


@dataclass(frozen=True)
class Failure:
    """One sentence for standard error, and the exit code."""

    sentence: str
    exit_code: int


def failure_of(error: BaseException) -> Failure:
    """Return the sentence and exit code for an exception that ended a command."""
    sentence = _known_sentence(error)
    if sentence is not None:
        return Failure(_shortened(" ".join(sentence.split())), EXIT_USER_ERROR)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return Failure("interrupted", EXIT_INTERRUPTED)
    if isinstance(error, TerminatedError):
        return Failure("terminated", EXIT_TERMINATED)
    if isinstance(error, BrokenPipeError):
        return Failure("the reader of the output went away", EXIT_BROKEN_PIPE)
    name = type(error).__name__
    return Failure(
        f"internal error ({name}: {error}): this is a bug, --debug shows where", EXIT_INTERNAL_ERROR
    )


def _shortened(sentence: str) -> str:
    """Return the sentence, shortened: names from a file may have any length."""
    if len(sentence) <= _LONGEST_SENTENCE:
        return sentence
    half = _LONGEST_SENTENCE // 2
    return f"{sentence[:half]} ... {sentence[-half:]}"


def _known_sentence(error: BaseException) -> str | None:
    if isinstance(error, SpecbuildError):
        return str(error)
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if isinstance(error, ImportError):
        return _unusable_package(error)
    if isinstance(error, MemoryError):
        return "memory ran out: ask for less (--max-batch-size, --max-seq-len) or use more memory"
    if isinstance(error, OSError):
        return _surroundings(error)
    return None


def _usage(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message().rstrip(".")
    suggestion = _suggested_option(error, context)
    if suggestion is not None:
        return f"{suggestion}? See {context.command_path} --help"
    return f"{error.format_message().rstrip('.')}; see {context.command_path} --help"


def _suggested_option(error: typer.TyperException, context: typer.Context) -> str | None:
    """Return a suggestion for an unknown option; None for other errors."""
    name = getattr(error, "option_name", None)
    if not isinstance(name, str):
        return None
    params = context.command.get_params(context)
    flags = {flag.lstrip("-").replace("-", "_"): flag for p in params for flag in p.opts}
    near = nearest_name(name.lstrip("-").replace("-", "_"), flags)
    return None if near is None else f"there is no option {name}: did you mean {flags[near]}"


def _unusable_package(error: ImportError) -> str | None:
    """Return the advice for a package that is missing, or lacks an imported name.

    It is None for modules of specbuild and of Python itself, whose absence is a bug.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "specbuild") or package in sys.stdlib_module_names:
        return None
    extra = EXTRA_OF_PACKAGE.get(package)
    requirement = "." if extra is None else f"'.[{extra}]'"
    if isinstance(error, ModuleNotFoundError):
        return f"package {package} is not installed: pip install {requirement} {_SOURCES}"
    upgrade = f"pip install --upgrade {requirement} {_SOURCES}"
    return f"package {package} cannot be used ({error}): {upgrade}"


def _surroundings(error: OSError) -> str | None:
    what = error.strerror or str(error)
    where = f"{error.filename}: {what}" if error.filename is not None else what
    if error.errno in _NO_SPACE:
        return f"{where}: free some space there, or write to another disk"
    return where if error.errno in _SURROUNDINGS else None
