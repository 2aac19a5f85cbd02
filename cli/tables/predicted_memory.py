"""Predicts the memory of an engine from its manifest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.builder.engine.pool_sizes import PoolBudget, slots_for
from specbuild.builder.engine.sizes import require_rows, require_seq_len
from specbuild.builder.options import LimitOptions
from specbuild.runtime.cache.state_layout import state_bytes
from specbuild.runtime.device import group_bytes, outputs_bytes
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, Manifest
from specbuild.runtime.engine_dir.plan import Plan
from specbuild.runtime.engine_dir.ranks import groups_of_rank
from specbuild.runtime.engine_dir.weights_file import DTYPES
from specbuild.runtime.executors.cuda.memory import footprint


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes by use, for a batch size and a sequence length.

    ``kv_bytes`` and ``page_bytes`` are by cache group: of all pages, including page 0, and of one.
    ``state_bytes`` and ``slot_bytes`` are by group of recurrent states: of all slots, and of those
    of one sequence. On a GPU every tensor has its own memory, also if it shares the bytes of
    another in the file; ``outputs_bytes`` are then scratch and state, at the engine's own limits.
    If several GPUs run an engine, all values are per GPU.
    """

    max_batch_size: int
    max_seq_len: int
    weights_bytes: int
    kv_bytes: dict[str, int]
    page_bytes: dict[str, int]
    state_bytes: dict[str, int]
    slot_bytes: dict[str, int]
    outputs_bytes: int
    total_bytes: int


def as_built_for(
    manifest: Manifest, *, max_batch_size: int | None = None, max_seq_len: int | None = None
) -> Manifest:
    """Return the manifest with the limits and cache groups of a build for other limits.

    Raises SpecbuildError for limits that the build refuses.
    """
    LimitOptions.check_bounds({"max_batch_size": max_batch_size, "max_seq_len": max_seq_len})
    built_limits = manifest.limits
    batch = built_limits.max_batch_size if max_batch_size is None else max_batch_size
    length = built_limits.max_seq_len if max_seq_len is None else max_seq_len
    if (batch, length) == (built_limits.max_batch_size, built_limits.max_seq_len):
        return manifest
    require_seq_len(length, manifest.target)
    if facts_of(manifest.backend).has_plan:
        require_rows("max-batch-size", batch, batch, MAX_DECODE_ROWS)
    rows = max(built_limits.max_rows, batch * _verified_rows(manifest))
    limits = replace(built_limits, max_seq_len=length, max_batch_size=batch, max_rows=rows)
    kv_options = [manifest.options.get(name) for name in ("kv_memory", "kv_pages")]
    memory, pages = (value if isinstance(value, int) else None for value in kv_options)
    budget = PoolBudget(memory, pages, _pool_copies(manifest), manifest.ranks)
    groups = budget.sized(manifest.cache_groups, limits, manifest.specpv)
    states = tuple(replace(group, slots=slots_for(limits)) for group in manifest.state_groups)
    return replace(manifest, limits=limits, cache_groups=groups, state_groups=states)


def predict_memory(manifest: Manifest, plan: Plan | None = None) -> PredictedMemory:
    """Return the memory at the engine's limits; see :func:`as_built_for` for other limits.

    ``outputs_bytes`` is the output of the largest launch: logits of every verified row and aux
    hidden states of every row. ``plan`` is that of a CUDA engine; without it this is an estimate.
    Engines of TensorRT-RTX have two copies of every cache pool.
    """
    limits = manifest.limits
    on_gpu = plan is not None or facts_of(manifest.backend).has_plan
    weights = _tensor_bytes(manifest) if on_gpu else _stored_bytes(manifest)
    copies = _pool_copies(manifest)
    groups = groups_of_rank(manifest.cache_groups, manifest.ranks)
    kv = {g.name: copies * group_bytes(g, manifest.specpv) for g in groups}
    states = {g.name: state_bytes(g, limits, manifest.backend) for g in manifest.state_groups}
    entries = limits.max_batch_size if on_gpu else slots_for(limits)
    outputs = outputs_bytes(manifest, batch=limits.max_batch_size)
    if plan is not None:
        planned = footprint(plan)
        outputs = planned.arena + planned.state + planned.exchange
    return PredictedMemory(
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        weights_bytes=weights,
        kv_bytes=kv,
        page_bytes={g.name: kv[g.name] // g.pages for g in manifest.cache_groups},
        state_bytes=states,
        slot_bytes={name: size // entries for name, size in states.items()},
        outputs_bytes=outputs,
        total_bytes=weights + sum(kv.values()) + sum(states.values()) + outputs,
    )


def _pool_copies(manifest: Manifest) -> int:
    return 1 if facts_of(manifest.backend).pools_in_place else 2


def _verified_rows(manifest: Manifest) -> int:
    """Return the rows of the largest launch that verifies one sequence."""
    reverified = 0 if manifest.specpv is None else manifest.specpv.n_spec_tokens_buf
    return reverified + manifest.limits.draft_tokens + 1


def _stored_bytes(manifest: Manifest) -> int:
    """Return the bytes of the weights file; TensorRT engines may store weights in their engines."""
    weights = manifest.files.get(WEIGHTS_FILE)
    planned = [role.file for role in manifest.roles.values()] if manifest.tensorrt else []
    engines = sum(manifest.files[name].bytes for name in planned)
    return engines + (0 if weights is None else weights.bytes)


def _tensor_bytes(manifest: Manifest) -> int:
    tensors = manifest.tensors.values()
    return sum(prod(tensor.shape) * DTYPES[tensor.dtype].itemsize for tensor in tensors)
