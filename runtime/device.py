"""What this machine is, and what the caches of an engine take of it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from specbuild.runtime.engine_dir.cache_groups import (
    CACHED_BYTES,
    choosing_group,
    slot_bytes,
    slots_per_sequence,
)
from specbuild.runtime.engine_dir.manifest import CacheGroup, Manifest, SpecPv


@dataclass(frozen=True)
class Device:
    """This machine. ``onnxruntime`` is its version, None where it is not installed."""

    cpu_name: str
    cores: int
    available_bytes: int | None
    onnxruntime: str | None
    physical_cores: int = 1


def this_device() -> Device:
    """Reads the machine's description; loads no library."""
    return Device(
        cpu_name=_cpu_name(),
        cores=_cores(),
        available_bytes=_available_bytes(),
        onnxruntime=_version("onnxruntime"),
        physical_cores=_physical_cores(),
    )


def pool_bytes(group: CacheGroup) -> int:
    """Bytes of all pools of this group."""
    element = CACHED_BYTES[group.dtype]
    widths = sum(sum(group.pool_widths(layer).values()) for layer in group.layers)
    return group.pages * group.page_size * group.kv_heads * widths * element


def cache_bytes(manifest: Manifest) -> int:
    """Bytes of every pool of a CPU engine, block summaries and recurrent states included."""
    pages = sum(group_bytes(group, manifest.specpv) for group in manifest.cache_groups)
    return pages + sum(group.slots * slot_bytes(group) for group in manifest.state_groups)


def group_bytes(group: CacheGroup, specpv: SpecPv | None) -> int:
    """Bytes of all pools of this group and of its layers' block summaries."""
    return pool_bytes(group) + len(group.layers) * summary_bytes(group, specpv)


def summary_bytes(group: CacheGroup, specpv: SpecPv | None) -> int:
    """Bytes of one layer's block summaries: SpecPV has them for the keys that it chooses by."""
    if specpv is None or group.name != choosing_group(specpv):
        return 0
    element = CACHED_BYTES[group.dtype]
    return group.pages * group.kv_heads * 2 * group.k_width * element


def outputs_bytes(manifest: Manifest, *, batch: int) -> int:
    """Bytes that the largest launch returns: logits of every verified row, and of every
    row the aux hidden states and what it brings to recurrent states."""
    limits = manifest.limits
    # What a full step of SpecPV re-verifies is checked against the logits too.
    reverified = 0 if manifest.specpv is None else manifest.specpv.n_spec_tokens_buf
    logit_rows = batch * (limits.draft_tokens + 1 + reverified)
    aux_hidden = limits.max_rows * len(manifest.aux_layers) * manifest.target.hidden
    states = limits.max_rows * sum(g.row_width * len(g.layers) for g in manifest.state_groups)
    return 4 * (logit_rows * manifest.target.vocab + aux_hidden + states)


def table_bytes(manifest: Manifest) -> int:
    """Bytes of what the host keeps of pages and slots, at the limits: page tables, free lists."""
    limits, slots = manifest.limits, slots_per_sequence(manifest.limits)
    counted = 2 * 4 * (slots + limits.max_rows + 1)
    for group in manifest.cache_groups:
        entries = 2 * -(-slots // group.page_size) + slots
        # A free page is a Python int in a list.
        counted += 4 * limits.max_batch_size * entries + 40 * group.pages
        if manifest.specpv is not None and group.name == choosing_group(manifest.specpv):
            heads = limits.max_batch_size * len(group.layers) * group.kv_heads
            counted += 2 * 4 * heads * _view_pages(manifest.specpv, group.page_size)
    return counted


def _view_pages(config: SpecPv, page_size: int) -> int:
    """Pages of SpecPV's largest view, or a few more."""
    blocks = config.n_sink_blocks + config.n_retrieval_blocks + config.n_window_blocks + 1
    return -(-(blocks * config.block_size + 2 * config.n_spec_tokens_buf) // page_size)


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


def _physical_cores() -> int:
    """The cores of which this process may use a hardware thread; all threads if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return _cores()
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})
    except OSError:
        return _cores()


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _version(package: str) -> str | None:
    import importlib.metadata  # With the parsers of email messages: 4 % of the runtime's import.

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
