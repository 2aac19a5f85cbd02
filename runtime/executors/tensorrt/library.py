"""The TensorRT library of the runtime: the one place that imports it."""

from __future__ import annotations

import importlib
from typing import Any

from specbuild.runtime.errors import UnsupportedHereError

LEAST_VERSION: dict[str, tuple[int, int]] = {"tensorrt": (10, 16), "tensorrt-rtx": (1, 7)}
_INSTALL = {
    "tensorrt": "pip install 'specbuild[tensorrt]'",
    "tensorrt-rtx": "pip install tensorrt-rtx",
}


def load(backend: str) -> Any:
    """The module of a backend, ``tensorrt`` or ``tensorrt-rtx``; both have one interface.

    Raises UnsupportedHereError where it is missing, does not load, or is too old.
    """
    try:
        module = importlib.import_module(backend.replace("-", "_"))
    except ImportError as error:
        raise UnsupportedHereError(
            f"{backend} is not installed ({error}); {_INSTALL[backend]}"
        ) from error
    found, least = str(module.__version__), LEAST_VERSION[backend]
    if version_numbers(found) < least:
        raise UnsupportedHereError(
            f"{backend} is {found}, {least[0]}.{least[1]} or later is needed; "
            f"{_INSTALL[backend].replace('install', 'install --upgrade')}"
        )
    return module


def version_numbers(version: str) -> tuple[int, int]:
    """Major and minor number."""
    major, minor, *_ = (*version.split("."), "0")
    return int(major), int(minor)
