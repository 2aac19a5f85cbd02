"""Properties of this machine beyond those that the runtime reads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_CAPABILITY_ATTRIBUTES = (75, 76)
_SUPPORTED_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: its CUDA version, and its visible GPUs."""

    cuda_version: str
    gpus: int


def package_version(package: str) -> str | None:
    """Return the version of an installed distribution without importing it, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> Driver | None:
    """Return the NVIDIA driver, read through its library, or None."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, gpus = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    library.cuDeviceGetCount(ctypes.byref(gpus))
    return Driver(f"{version.value // 1000}.{version.value % 1000 // 10}", gpus.value)


def unconnected_gpus() -> list[tuple[int, int]]:
    """Return the pairs of GPUs that cannot both read the other's memory; none without a driver.

    An engine of several GPUs needs them connected.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, can = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []

    def reaches(device: int, peer: int) -> bool:
        status = library.cuDeviceCanAccessPeer(ctypes.byref(can), device, peer)
        return bool(status == 0 and can.value)

    pairs = combinations(range(count.value), 2)
    return [(i, j) for i, j in pairs if not (reaches(i, j) and reaches(j, i))]


def has_supported_gpu() -> bool:
    """Return whether the NVIDIA driver shows a GPU for CUDA engines: an H100 or H200."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count, value = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False

    def capability(device: int) -> tuple[int, ...]:
        status = []
        for attribute in _CAPABILITY_ATTRIBUTES:
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            status.append(value.value)
        return tuple(status)

    return any(capability(device) == _SUPPORTED_CAPABILITY for device in range(count.value))
