"""Checks which models, modes and sizes several GPUs can share."""

from __future__ import annotations

from collections.abc import Iterator

from specbuild.builder.backends.unlowered_parts import unlowered_parts
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.rms_moe.packing import BLOCK
from specbuild.runtime.engine_dir.feed_forward import BothFeedForward, DenseFeedForward
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.plan import RANKS
from specbuild.runtime.errors import SpecbuildError

FLAG = "--tensor-parallel"
# Parts of models outside GPT-OSS and Llama that a rank computes as a single GPU does.
_SHARED_PARTS = frozenset({"growth", "partial", "scale", "unrotated"})


def require_ranks(ranks: int) -> None:
    """Raise SpecbuildError for an unsupported number of GPUs."""
    if ranks not in RANKS:
        *others, last = RANKS
        listed = f"{', '.join(map(str, others))} or {last}"
        raise SpecbuildError(f"{FLAG}: got {ranks}, expected {listed}")


def require_shares(target: TargetGeometry, ranks: int) -> None:
    """Raise SpecbuildError for a part of a target that this number of GPUs cannot share.

    Experts need no check: their inner width is split in blocks of 32 columns, padded with zeros.
    """
    problem = next(_problems(target, ranks), None)
    if problem is None:
        return
    supported = [n for n in RANKS if n > 1 and next(_problems(target, n), None) is None]
    options = " or ".join(map(str, supported))
    advice = f"use {options}" if supported else f"remove {FLAG}"
    raise SpecbuildError(f"{FLAG} {ranks}: {problem}; {advice}")


def require_shared_modes(engine_sizes: EngineSizes) -> None:
    """Raise SpecbuildError for a mode that only one GPU supports."""
    modes = {
        "--specpv": engine_sizes.specpv,
        "--dsa": engine_sizes.dsa or engine_sizes.indexer_group,
    }
    for name, mode in modes.items():
        if engine_sizes.ranks > 1 and mode is not None:
            raise SpecbuildError(
                f"{FLAG} {engine_sizes.ranks} and {name}: not supported together; remove one of "
                "the options"
            )


def _problems(target: TargetGeometry, ranks: int) -> Iterator[str]:
    """Yield the parts of a target that ``ranks`` GPUs cannot share."""
    if target.latent_dims and target.mla is None:
        yield "trained latents (mla_kv.safetensors) do not support several GPUs"
    if target.vocab % TILE_ROWS:
        yield f"vocab_size {target.vocab} is not a multiple of {TILE_ROWS}"
    for part in unlowered_parts(target, _SHARED_PARTS):
        yield f"the model {part}, which several GPUs do not support"
    if target.q_heads % ranks:
        yield f"the model has {target.q_heads} query heads, which {ranks} GPUs cannot share"
    kv_heads = target.kv_heads
    if target.mla is None and kv_heads % ranks and ranks % kv_heads:
        yield f"the model has {kv_heads} KV heads, which {ranks} GPUs cannot share"
    for feed_forward in target.feed_forwards:
        dense = feed_forward
        if isinstance(feed_forward, BothFeedForward):
            if feed_forward.dense.inner % feed_forward.moe.inner == 0:
                continue  # shared experts are computed as additional routed experts
            dense = feed_forward.dense
        if isinstance(dense, DenseFeedForward) and dense.inner % (BLOCK * ranks):
            yield f"down_proj has K {dense.inner}, which is not a multiple of {ranks} × {BLOCK}"
    values = target.q_heads * (target.head_dim if target.mla is None else target.mla.v_dim)
    if values % (BLOCK * ranks):
        yield f"o_proj has K {values}, which is not a multiple of {ranks} × {BLOCK}"
