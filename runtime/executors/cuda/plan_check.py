"""Checks that a plan stays within its memory, and agrees with the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from specbuild.runtime.cache.layout import KvLayout, layouts, validate_caches
from specbuild.runtime.cache.state_layout import state_layout
from specbuild.runtime.engine_dir.cache_groups import choosing_group
from specbuild.runtime.engine_dir.drafters.record import own_name
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import (
    FIRST_ROWS,
    ITEM_BYTES,
    OFFERED,
    ROW_COUNTS,
    TOP_PATH,
    Plan,
    ProgramEntry,
)
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError
from specbuild.runtime.executors.cuda.memory import check_ports
from specbuild.runtime.executors.cuda.program_file import MAX_SHARED_BYTES

MAX_REGISTERS = 255
_MAX_BYTES = 1 << 48  # the address space of a GPU
# State that logit-processor steps read for every token of a sequence.
_ROWS_OF_LOGITS = ("bias", "marks", "prefill.logits")
# The offset that maps each of a draft's ids to one of the target's.
_DRAFT_OFFSETS = "d2t"

# An embedding has a row for each token, or tiles of 16 if it is packed.
_PACKED, _TILE_ROWS = "embed_tokens.packed", 16
_TABLES = ("embed_tokens.weight", _PACKED)


def check_plan(plan: Plan, manifest: Manifest) -> None:
    """Raise EngineFileError for the first inconsistency."""
    drafts = {model.cache_group: model.geometry for model in manifest.models}
    validate_caches(manifest.cache_groups, manifest.target, drafts)
    check_ports(plan)
    checks = (
        _buffers(plan, manifest),
        _kernels(plan, manifest),
        _ports(plan, manifest),
        _programs(plan, manifest),
        _tables(manifest),
    )
    for problems in checks:
        problem = next(problems, None)
        if problem is not None:
            raise EngineFileError(problem)


def draft_offsets(manifest: Manifest) -> tuple[str, ...]:
    """Return the tensors of the offsets of the drafts' ids."""
    names = (own_name(model.cache_group, _DRAFT_OFFSETS) for model in manifest.models)
    return tuple(name for name in names if name in manifest.tensors)


def check_draft_offsets(name: str, offsets: np.ndarray, manifest: Manifest) -> None:
    """Raise EngineFileError if a draft's id would be outside the target's vocabulary."""
    ids = np.arange(len(offsets)) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= manifest.target.vocab))
    if len(outside):
        raise OutdatedEngineError(
            f"{name}: the draft's id {outside[0]} is {ids[outside[0]]}, outside the "
            f"vocabulary of {manifest.target.vocab}"
        )


def _buffers(plan: Plan, manifest: Manifest) -> Iterator[str]:
    if plan.ranks != manifest.ranks:
        yield f"the plan is for {plan.ranks} ranks, the manifest for {manifest.ranks}"
    caches = _cache_buffers(manifest)
    for buffer in plan.buffers:
        if not 0 <= buffer.bytes < _MAX_BYTES:
            yield f"buffer {buffer.name!r} has {buffer.bytes} bytes"
        if buffer.space == "weights" and buffer.name not in manifest.tensors:
            yield f"buffer {buffer.name!r} is no tensor of the manifest"
        if buffer.space == "exchange" and plan.ranks == 1:
            yield f"buffer {buffer.name!r} is written by other ranks, but there are none"
        if buffer.space == "cache" and caches.get(buffer.name) != buffer.bytes:
            yield (
                f"buffer {buffer.name!r} has {buffer.bytes} bytes, the manifest's cache groups "
                f"take {caches}"
            )
    yield from _twice("buffers", [buffer.name for buffer in plan.buffers])
    missing = set(caches) - {buffer.name for buffer in plan.buffers if buffer.space == "cache"}
    if missing:
        yield f"caches {sorted(missing)} have no buffer"
    if sum(buffer.space == "arena" for buffer in plan.buffers) > 1:
        yield "there are two arenas"


def _cache_buffers(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of every cache group's pools, and of the block summaries (SpecPV)."""
    actual = layouts(manifest.cache_groups, manifest.ranks)
    caches = {layout.name: layout.bytes for layout in actual.values() if layout.bytes}
    for group in manifest.state_groups:
        states = state_layout(group, manifest.limits)
        caches[states.name] = states.bytes
    if manifest.specpv is not None:
        layout = actual.get(choosing_group(manifest.specpv))
        if layout is not None:
            caches[f"{layout.name}.summaries"] = _summary_bytes(layout)
    return caches


def _summary_bytes(layout: KvLayout) -> int:
    """[layers, pages, kv_heads, 2, width]."""
    pages, heads, _, width = layout.pools[0].shape
    layers = len(layout.group.layers)
    return layers * pages * heads * 2 * width * ITEM_BYTES[layout.dtype]


def _kernels(plan: Plan, manifest: Manifest) -> Iterator[str]:
    for kernel in plan.kernels:
        if kernel.cubin not in manifest.files:
            yield f"kernel {kernel.name!r} is in {kernel.cubin!r}, which is no part of the engine"
        if not 0 <= kernel.registers <= MAX_REGISTERS or kernel.spill_bytes < 0:
            yield f"kernel {kernel.name!r} has {kernel.registers} registers"
        if not 0 <= kernel.shared_bytes <= MAX_SHARED_BYTES:
            yield f"kernel {kernel.name!r} has {kernel.shared_bytes} bytes of shared memory"


def _ports(plan: Plan, manifest: Manifest) -> Iterator[str]:
    yield from _twice("ports", [port.name for port in plan.ports])
    ports = {port.name: port.shape for port in plan.ports}
    sequences = ports.get("length", (0,))[0]
    if sequences < manifest.limits.max_batch_size:
        yield f"the plan has state for {sequences} sequences, fewer than limits.max_batch_size"
    for name, layout in layouts(manifest.cache_groups).items():
        expected = (sequences, layout.logical_pages(manifest.limits))
        if ports.get(f"page_table.{name}") != expected:
            actual = ports.get(f"page_table.{name}")
            yield f"port 'page_table.{name}' is {actual}, the manifest's limits take {expected}"
    vocab = manifest.target.vocab
    for name in ("score.logits", *_ROWS_OF_LOGITS):
        columns = ports.get(name, (vocab,))[-1]
        if columns != vocab:
            yield f"port {name!r} has {columns} columns, the vocabulary {vocab}"
    if any(entry.changes_logits or entry.kind == "adjust" for entry in plan.programs):
        words = (sequences, -(-vocab // 32))
        rows = {"mask": words} | dict.fromkeys(_ROWS_OF_LOGITS, (sequences, vocab))
        for name, shape in rows.items():
            if ports.get(name) != shape:
                yield f"port {name!r} is {ports.get(name)}, adjusted steps take {shape}"


def _programs(plan: Plan, manifest: Manifest) -> Iterator[str]:
    ports = {port.name: port.shape[0] for port in plan.ports}
    for entry in plan.programs:
        if entry.file not in manifest.files:
            yield f"program {entry.name!r} is in {entry.file!r}, which is no part of the engine"
        if not 1 <= entry.batch <= ports.get("length", 0):
            yield f"program {entry.name!r} is for {entry.batch} sequences"
        if entry.kind == "step":
            maximum = entry.batch * (manifest.limits.draft_tokens + 1) + entry.reverified
        else:
            maximum = ports.get("prefill.token_ids", 0)
        if not 1 <= entry.rows <= maximum or entry.launches < 1 or entry.reverified < 0:
            yield f"program {entry.name!r} has {entry.rows} rows and {entry.launches} launches"
        yield from _draft_of(entry, manifest)
        if entry.host_proposal and entry.batch * (entry.draft_tokens + 2) > ports.get(OFFERED, 0):
            yield f"program {entry.name!r} reads more than port {OFFERED!r} has"
        for name, minimum in _row_ports(entry, manifest):
            if ports.get(name, 0) < minimum:
                yield (
                    f"program {entry.name!r} takes {minimum} entries of port {name!r}, which has "
                    f"{ports.get(name, 0)}"
                )
        if entry.is_ragged and entry.rows < entry.batch:
            yield f"program {entry.name!r} has {entry.rows} rows for {entry.batch} sequences"
    yield from _twice("programs", [entry.name for entry in plan.programs])


def _row_ports(entry: ProgramEntry, manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Return the ports with values of a step's rows, and how many entries the step takes.

    The host writes the numbers of rows of a ragged step. It reads the most likely tokens of steps
    that apply logit processors, and the rows that they belong to.
    """
    if entry.kind != "step":
        return
    if entry.is_ragged and not entry.host_proposal:
        yield ROW_COUNTS, entry.batch
    if entry.changes_logits or (entry.full_logits and manifest.drafted_logit_processors):
        yield "top_ids", entry.rows
        yield "top_logprobs", entry.rows
        if entry.draft_depth:
            yield TOP_PATH, entry.batch * (entry.draft_depth + 1)
        if entry.is_ragged:
            yield FIRST_ROWS, entry.batch + 1


def _draft_of(entry: ProgramEntry, manifest: Manifest) -> Iterator[str]:
    for name in ("draft_top_k", "draft_depth", "draft_tokens"):
        value, maximum = getattr(entry, name), getattr(manifest.limits, name)
        if value and not 0 < value <= maximum:
            yield f"program {entry.name!r} has {name} {value}, the limits say {maximum}"
    kinds = [model.kind for model in manifest.models]
    drafts = entry.draft_depth > 0 and not entry.host_proposal
    if entry.drafter not in (kinds if drafts and len(kinds) > 1 else ("",)):
        yield f"program {entry.name!r} drafts with {entry.drafter!r}, the engine has {kinds}"


def _tables(manifest: Manifest) -> Iterator[str]:
    """Check that weights indexed by token ids and by positions have a row for each."""
    limits = manifest.limits
    rows = {"rope": limits.max_seq_len + limits.draft_tokens + 1}
    expected = {}
    for model in manifest.models:
        for rope in ("draft_rope", "draft_window_rope"):
            rows[own_name(model.cache_group, rope)] = limits.max_seq_len + limits.draft_depth
        expected[own_name(model.cache_group, _DRAFT_OFFSETS)] = model.geometry.vocab
    expected |= {f"{rope}_{part}": n for rope, n in rows.items() for part in ("cos", "sin")}
    for name, tensor in manifest.tensors.items():
        minimum, rows_of_first = expected.get(name, 0), 1
        if name.endswith(_TABLES):
            minimum = manifest.target.vocab
            rows_of_first = _TILE_ROWS if name.endswith(_PACKED) else 1
        if minimum and (not tensor.shape or rows_of_first * tensor.shape[0] < minimum):
            yield f"tensor {name!r} is {tensor.shape}, but {minimum} rows of it are read"


def _twice(what: str, names: Iterable[str]) -> Iterator[str]:
    checked: set[str] = set()
    for name in names:
        if name in checked:
            yield f"two {what} are named {name!r}"
        checked.add(name)
