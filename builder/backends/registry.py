"""The registry of backends. A new backend is added here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.builder.backends.backend import Backend
from specbuild.builder.backends.cpu.backend import CPU
from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.tensorrt.plugins.backend import TENSORRT
from specbuild.builder.backends.tensorrt.standard.backend import TENSORRT_RTX
from specbuild.runtime.engine_dir.backends import BackendName

# A backend's ``lower`` accepts only the type that its ``options`` returns.
BACKENDS: Mapping[BackendName, Backend[Any]] = {
    "cpu": CPU,
    "cuda": CUDA,
    "tensorrt": TENSORRT,
    "tensorrt-rtx": TENSORRT_RTX,
}


def backend_of(name: BackendName) -> Backend[Any]:
    """Return the backend of ``--backend NAME``."""
    return BACKENDS[name]
