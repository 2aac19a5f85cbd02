"""What this machine is, and whether an engine runs on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from specbuild.runtime.engine_dir.cache_groups import CACHED_BYTES
from specbuild.runtime.engine_dir.manifest import TENSORRT_BACKENDS, CacheGroup, Manifest, SpecPv
from specbuild.runtime.lossy.specpv.state import choosing_group

MIN_ONNXRUNTIME = (1, 23)


@dataclass(frozen=True)
class Device:
    """This machine. ``onnxruntime`` is its version, None where it is not installed."""

    cpu_name: str
    cores: int
    available_bytes: int | None
    onnxruntime: str | None


def this_device() -> Device:
    """Reads the machine's description; loads no library."""
    return Device(
        cpu_name=_cpu_name(),
        cores=_cores(),
        available_bytes=_available_bytes(),
        onnxruntime=_version("onnxruntime"),
    )


def pool_bytes(group: CacheGroup) -> int:
    """Bytes of all pools of this group."""
    element = CACHED_BYTES[group.dtype]
    widths = sum(sum(group.pool_widths(layer).values()) for layer in group.layers)
    return group.pages * group.page_size * group.kv_heads * widths * element


def cache_bytes(manifest: Manifest) -> int:
    """Bytes of every pool of the engine, block summaries included."""
    return sum(group_bytes(group, manifest.specpv) for group in manifest.cache_groups)


def group_bytes(group: CacheGroup, specpv: SpecPv | None) -> int:
    """Bytes of all pools of this group and of its layers' block summaries."""
    return pool_bytes(group) + len(group.layers) * summary_bytes(group, specpv)


def summary_bytes(group: CacheGroup, specpv: SpecPv | None) -> int:
    """Bytes of one layer's block summaries: SpecPV has them for the keys that it chooses by."""
    if specpv is None or group.name != choosing_group(specpv):
        return 0
    element = CACHED_BYTES[group.dtype]
    return group.pages * group.kv_heads * 2 * group.k_width * element


def check_here(
    manifest: Manifest, device: Device | None = None, *, directory: Path | None = None
) -> list[str]:
    """Every reason why the engine does not run on this machine; empty when it does.

    Loads no weights. Of a CUDA engine the plan in ``directory`` is read, of a TensorRT engine the
    headers, the library's version and the plugins' are, and the GPU is asked.
    """
    if manifest.backend == "cuda":
        from specbuild.runtime.executors.cuda.check import reasons_here

        if directory is None:
            raise ValueError("a CUDA engine is checked by its plan: give its directory")
        return reasons_here(directory, manifest)
    if manifest.backend in TENSORRT_BACKENDS:
        from specbuild.runtime.executors.tensorrt.loading import reasons_against

        if directory is None:
            raise ValueError("a TensorRT engine is checked by its files: give its directory")
        return reasons_against(directory, manifest)
    here = device or this_device()
    reasons = []
    if here.onnxruntime is None:
        reasons.append("onnxruntime is not installed; pip install 'specbuild[cpu]'")
    elif _numbers(here.onnxruntime) < MIN_ONNXRUNTIME:
        wanted = ".".join(map(str, MIN_ONNXRUNTIME))
        reasons.append(f"onnxruntime is {here.onnxruntime}, {wanted} or later is needed")
    needed = cache_bytes(manifest) + sum(file.bytes for file in manifest.files.values())
    if here.available_bytes is not None and needed > here.available_bytes:
        reasons.append(
            f"weights and caches take {needed / 2**30:.1f} GiB, "
            f"{here.available_bytes / 2**30:.1f} GiB of memory are free"
        )
    return reasons


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
