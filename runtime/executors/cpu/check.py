"""Checks whether an engine of ONNX graphs runs on this machine, and lists the reasons if not."""

from __future__ import annotations

from pathlib import Path

from specbuild.runtime.device import Device, cache_bytes, outputs_bytes, table_bytes
from specbuild.runtime.engine_dir.manifest import Manifest

# The tested versions: earlier ones open files that a graph names.
MIN_ONNXRUNTIME = (1, 31)


def reasons_here(_directory: Path, manifest: Manifest, here: Device) -> list[str]:
    """Return why the engine does not run here, without importing ONNX Runtime."""
    reasons = []
    if here.onnxruntime is None:
        reasons.append(
            "onnxruntime is not installed; pip install '.[cpu]' where specbuild's sources are"
        )
    elif _numbers(here.onnxruntime) < MIN_ONNXRUNTIME:
        required = ".".join(map(str, MIN_ONNXRUNTIME))
        reasons.append(f"onnxruntime is {here.onnxruntime}, {required} or later is needed")
    needed = needed_bytes(manifest)
    if here.available_bytes is not None and needed > here.available_bytes:
        reasons.append(
            f"weights, caches and outputs take {needed / 2**30:.1f} GiB, "
            f"{here.available_bytes / 2**30:.1f} GiB of memory are free"
        )
    return reasons


def needed_bytes(manifest: Manifest) -> int:
    """Return the bytes of memory of the engine at its limits: files, caches, outputs, tables."""
    files = sum(file.bytes for file in manifest.files.values())
    outputs = outputs_bytes(manifest, batch=manifest.limits.max_batch_size)
    return files + cache_bytes(manifest) + outputs + table_bytes(manifest)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
