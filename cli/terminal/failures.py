"""What a failed command says, and the exit code it leaves: the only place that decides either."""

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
# Extras of pyproject.toml by the packages that they install, as these are imported. The command
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
    """SIGTERM asks the process to end."""


@dataclass(frozen=True)
class Failure:
    """One sentence for standard error, and the exit code."""

    sentence: str
    exit_code: int


def failure_of(error: BaseException) -> Failure:
    """The sentence and exit code for an exception that ended a command."""
    known = _sentence_of_known(error)
    if known is not None:
        return Failure(_shortened(" ".join(known.split())), EXIT_USER_ERROR)
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
    """The sentence at a length that is read: a file may hold names of any."""
    if len(sentence) <= _LONGEST_SENTENCE:
        return sentence
    half = _LONGEST_SENTENCE // 2
    return f"{sentence[:half]} ... {sentence[-half:]}"


def _sentence_of_known(error: BaseException) -> str | None:
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
    meant = _meant_option(error, context)
    if meant is not None:
        return f"{meant}? See {context.command_path} --help"
    return f"{error.format_message().rstrip('.')}; see {context.command_path} --help"


def _meant_option(error: typer.TyperException, context: typer.Context) -> str | None:
    """A question after the option that an unknown one means; None for other errors."""
    name = getattr(error, "option_name", None)
    if not isinstance(name, str):
        return None
    params = context.command.get_params(context)
    flags = {flag.lstrip("-").replace("-", "_"): flag for p in params for flag in p.opts}
    near = nearest_name(name.lstrip("-").replace("-", "_"), flags)
    return None if near is None else f"there is no option {name}: did you mean {flags[near]}"


def _unusable_package(error: ImportError) -> str | None:
    """What to install for a package that is missing, or lacks what is imported from it.

    None for modules of specbuild and of Python itself, whose absence is a bug.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "specbuild") or package in sys.stdlib_module_names:
        return None
    extra = EXTRA_OF_PACKAGE.get(package)
    wanted = "." if extra is None else f"'.[{extra}]'"
    if isinstance(error, ModuleNotFoundError):
        return f"package {package} is not installed: pip install {wanted} {_SOURCES}"
    return f"package {package} cannot be used ({error}): pip install --upgrade {wanted} {_SOURCES}"


def _surroundings(error: OSError) -> str | None:
    what = error.strerror or str(error)
    where = f"{error.filename}: {what}" if error.filename is not None else what
    if error.errno in _NO_SPACE:
        return f"{where}: free some space there, or write to another disk"
    return where if error.errno in _SURROUNDINGS else None
