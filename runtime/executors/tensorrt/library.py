"""The only module of the runtime that imports TensorRT or TensorRT-RTX."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES, library_reason


def load(backend: str) -> Any:
    """Return the module of a backend, ``tensorrt`` or ``tensorrt-rtx``; the interface is the same.

    Raises UnsupportedHereError if it is missing, too old, or does not load.
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
    """Return a logger that stores the errors of the library."""

    def log(_self: Any, severity: Any, message: str) -> None:
        if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
            errors.append(message)

    def initialise(self: Any) -> None:
        library.ILogger.__init__(self)

    return type("ErrorLogger", (library.ILogger,), {"__init__": initialise, "log": log})()


def new_runtime(library: Any, errors: list[str]) -> Any:
    """Return a runtime whose logger appends to ``errors``.

    Raises UnsupportedHereError if the library cannot use the GPU, for example if the driver is too
    old.
    """
    runtime = library.Runtime(new_logger(library, errors))
    if errors:
        # The object has a null pointer, and its destructor would crash the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
        raise UnsupportedHereError(
            f"TensorRT {library.__version__} cannot use this GPU ({last_error(errors)}); install a "
            "newer driver, or build with --backend cuda"
        )
    return runtime


def last_error(errors: list[str]) -> str:
    """Return the last report in one line of at most 300 characters."""
    return " ".join(errors[-1].split())[:300]
