"""The one place of the runtime that imports TensorRT, or TensorRT-RTX in its place."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES, library_reason


def load(backend: str) -> Any:
    """The module of a backend, ``tensorrt`` or ``tensorrt-rtx``; both have one interface.

    Raises UnsupportedHereError where it is missing, too old, or does not load.
    """
    reason = library_reason(backend)
    if reason is not None:
        raise UnsupportedHereError(reason)
    try:
        return importlib.import_module(LIBRARIES[backend].module)
    except (ImportError, OSError, RuntimeError) as error:  # a shared library is missing or broken
        facts = LIBRARIES[backend]
        raise UnsupportedHereError(
            f"{facts.title} cannot be loaded ({error}); {facts.install}"
        ) from error


def new_logger(library: Any, errors: list[str]) -> Any:
    """A logger that keeps what the library reports as an error."""

    def log(_self: Any, severity: Any, message: str) -> None:
        if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
            errors.append(message)

    def initialise(self: Any) -> None:
        library.ILogger.__init__(self)

    return type("ErrorLogger", (library.ILogger,), {"__init__": initialise, "log": log})()


def new_runtime(library: Any, errors: list[str]) -> Any:
    """A runtime whose logger appends to ``errors``.

    Raises UnsupportedHereError where the library cannot use the GPU, as with too old a driver.
    """
    runtime = library.Runtime(new_logger(library, errors))
    if errors:
        # The object holds a null pointer, and its destructor would crash the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
        raise UnsupportedHereError(
            f"TensorRT {library.__version__} cannot use this GPU ({last_error(errors)}); install a "
            "newer driver, or build with --backend cuda"
        )
    return runtime


def last_error(errors: list[str]) -> str:
    """The last report in one line of at most 300 characters."""
    return " ".join(errors[-1].split())[:300]
