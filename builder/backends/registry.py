"""Every backend that a build can choose: the one place that a new one is added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.builder.backends.backend import Backend
from specbuild.builder.backends.cpu.backend import CPU
from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.tensorrt.plugins.backend import TENSORRT
from specbuild.builder.backends.tensorrt.standard.backend import TENSORRT_RTX
from specbuild.runtime.engine_dir.backends import BackendName

# Each takes its own options: what ``options`` gives, ``lower`` is given again.
BACKENDS: Mapping[BackendName, Backend[Any]] = {
    "cpu": CPU,
    "cuda": CUDA,
    "tensorrt": TENSORRT,
    "tensorrt-rtx": TENSORRT_RTX,
}


def backend_of(name: BackendName) -> Backend[Any]:
    """The backend of ``--backend NAME``."""
    return BACKENDS[name]
