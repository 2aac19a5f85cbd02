"""How much memory an engine will take, from its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from specbuild.builder.engine.pool_sizes import PoolBudget
from specbuild.runtime.device import group_bytes, outputs_bytes
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, CacheGroup, Manifest
from specbuild.runtime.engine_dir.plan import Plan
from specbuild.runtime.engine_dir.weights_file import DTYPES
from specbuild.runtime.executors.cuda.memory import footprint


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes by use, for a batch size and a sequence length.

    On a GPU every tensor has memory of its own, also one whose bytes are another's in the file;
    ``outputs_bytes`` are then scratch and state, those of the engine's own limits.
    """

    max_batch_size: int
    max_seq_len: int
    weights_bytes: int
    kv_bytes: dict[str, int]
    outputs_bytes: int
    total_bytes: int


def predict_memory(
    manifest: Manifest,
    plan: Plan | None = None,
    *,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
) -> PredictedMemory:
    """Memory at the engine's own limits, or at others (as if it had been built for them).

    ``outputs_bytes`` is what the largest launch returns: logits of every verified row and
    aux hidden states of every row. ``plan`` is that of a CUDA engine; without it they are a guess.
    Engines of TensorRT-RTX have two places for every cache pool.
    """
    limits = manifest.limits
    batch = limits.max_batch_size if max_batch_size is None else max_batch_size
    length = limits.max_seq_len if max_seq_len is None else max_seq_len
    facts = facts_of(manifest.backend)
    on_gpu = plan is not None or facts.has_plan
    weights = _tensor_bytes(manifest) if on_gpu else _stored_bytes(manifest)
    places = 1 if facts.pools_in_place else 2
    kv = {
        group.name: places * group_bytes(group, manifest.specpv)
        for group in _groups(manifest, batch, length, places)
    }
    outputs = outputs_bytes(manifest, batch=batch)
    if plan is not None:
        held = footprint(plan)
        outputs = held.arena + held.state
    total = weights + sum(kv.values()) + outputs
    return PredictedMemory(batch, length, weights, kv, outputs, total)


def _stored_bytes(manifest: Manifest) -> int:
    """The weights' file; TensorRT engines may hold their weights themselves."""
    weights = manifest.files.get(WEIGHTS_FILE)
    held = [role.file for role in manifest.roles.values()] if manifest.tensorrt else []
    engines = sum(manifest.files[name].bytes for name in held)
    return engines + (0 if weights is None else weights.bytes)


def _tensor_bytes(manifest: Manifest) -> int:
    tensors = manifest.tensors.values()
    return sum(prod(tensor.shape) * DTYPES[tensor.dtype].itemsize for tensor in tensors)


def _groups(manifest: Manifest, batch: int, length: int, places: int) -> tuple[CacheGroup, ...]:
    """The cache groups, as a build for these limits would size them."""
    if (batch, length) == (manifest.limits.max_batch_size, manifest.limits.max_seq_len):
        return manifest.cache_groups
    limits = replace(manifest.limits, max_seq_len=length, max_batch_size=batch)
    asked = [manifest.options.get(name) for name in ("kv_memory", "kv_pages")]
    memory, pages = (value if isinstance(value, int) else None for value in asked)
    return PoolBudget(memory, pages, places).sized(manifest.cache_groups, limits, manifest.specpv)
