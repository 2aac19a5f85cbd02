"""What this machine has, beyond what the runtime asks of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the CUDA version it speaks, and the GPUs it shows."""

    cuda_version: str
    gpus: int


def package_version(package: str) -> str | None:
    """The installed version of a distribution, without importing it; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> Driver | None:
    """The NVIDIA driver, asked through its own library; None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, gpus = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    library.cuDeviceGetCount(ctypes.byref(gpus))
    return Driver(f"{version.value // 1000}.{version.value % 1000 // 10}", gpus.value)
