"""What this machine has, beyond what the runtime asks of it."""

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


def unconnected_gpus() -> list[tuple[int, int]]:
    """The pairs of GPUs that cannot both read the other's memory; none without a driver.

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
        found = library.cuDeviceCanAccessPeer(ctypes.byref(can), device, peer)
        return bool(found == 0 and can.value)

    pairs = combinations(range(count.value), 2)
    return [(i, j) for i, j in pairs if not (reaches(i, j) and reaches(j, i))]


def has_supported_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU that CUDA engines run on: an H100 or H200."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count, value = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False

    def capability(device: int) -> tuple[int, ...]:
        found = []
        for attribute in _CAPABILITY_ATTRIBUTES:
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            found.append(value.value)
        return tuple(found)

    return any(capability(device) == _SUPPORTED_CAPABILITY for device in range(count.value))
