"""Checks which targets and drafts the CUDA kernels support, before any work."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.backends.cuda.kernel_limits import (
    require_heads,
    require_mla,
    require_quantized_experts,
    require_tiles,
)
from specbuild.builder.backends.cuda.step.programs import (
    batch_buckets,
    deepest,
    draft_shapes,
    fits,
)
from specbuild.builder.backends.unlowered_parts import require_lowered_parts
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.builder.engine.draft_shapes import NO_DRAFT
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.families.registry import draft_family
from specbuild.plugins_cuda.dsa_indexer.lowering import MAX_HEADS, MAX_WIDTH
from specbuild.plugins_cuda.lazy_gated_delta.lowering import refused_widths
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.mla_attention.geometry import (
    MAX_REBUILT,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import (
    CODED_WIDTHS,
)
from specbuild.plugins_cuda.rms_moe.choice import Choice, unknown_choice
from specbuild.plugins_cuda.rms_moe.lowering import MAX_HIDDEN
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    MoeFeedForward,
    routed_part,
)
from specbuild.runtime.engine_dir.geometry import (
    GatedDelta,
    IndexerGeometry,
    TargetGeometry,
)
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP
from specbuild.runtime.errors import SpecbuildError

# Parts that the fusions replace by ops with kernels.
_FUSED = frozenset(
    {
        *("all heads", "experts with gelu", "growth", "gelu", "layer inputs", "multipliers"),
        *("output norms", "partial", "scale", "shared caches", "unrotated", "value norm"),
        *("window heads", "window rope"),
    }
)


def require_cuda_support(target: TargetGeometry, draft: DraftGeometry | None) -> None:
    """Raise SpecbuildError for a part of this target or draft that no CUDA kernel computes."""
    states = {"states"} if target.gated_delta is not None else set()
    require_lowered_parts(target, "CUDA kernels", fused=_FUSED | states)
    widths = _require_feed_forwards(target)
    if target.indexer is not None:
        _require_indexers(target.indexer)
    require_tiles(
        "model",
        rows={},
        columns={"hidden_size": target.hidden, **widths},
    )
    if target.gated_delta is not None:
        _require_states(target.gated_delta)
    if target.mla is None:
        _require_keys(target)
    else:
        _require_no_lists(target)
        require_mla("model", target.q_heads, target.mla)
    if draft is None:
        return
    draft_family(draft.architecture).cuda.require(target, draft)


def _require_keys(target: TargetGeometry) -> None:
    """Raise SpecbuildError for caches of keys, or of trained latents, that no kernel reads."""
    widest = max(target.latent_dims, default=0)
    if widest > MAX_REBUILT:
        raise SpecbuildError(
            f"the model's layers cache latents of up to {widest} values (mla_kv.safetensors), but "
            f"CUDA kernels rebuild keys of up to {MAX_REBUILT}; use a lower --rank in retrofit, or "
            "build with --backend cpu or --no-mla"
        )
    require_heads("model", target)
    local = target.window_heads
    if local is not None:
        window_layers = replace(
            target, window_heads=None, kv_heads=local.kv_heads, head_dim=local.head_dim
        )
        require_heads("model", window_layers)


def _require_states(delta: GatedDelta) -> None:
    """Raise SpecbuildError for widths of recurrent states without a kernel."""
    refused = refused_widths(delta.key_width, delta.value_width)
    if refused is not None:
        raise SpecbuildError(
            f"the model's recurrent states have {refused}; build with --backend cpu"
        )
    require_tiles("model", rows={}, columns={"width of all recurrent values": delta.values})


def _require_no_lists(target: TargetGeometry) -> None:
    """Raise SpecbuildError for indexers in a model with native latents (MLA)."""
    if target.indexer is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type} with indexers (DSA): CUDA kernels of absorbed "
            "queries do not read lists of tokens; build with --backend cpu or --no-dsa"
        )


def _require_feed_forwards(target: TargetGeometry) -> dict[str, int]:
    """Return the inner widths of all layers by name. SpecbuildError for an unsupported layer."""
    widths: dict[str, int] = {}
    for feed_forward in target.feed_forwards:
        if isinstance(feed_forward, DenseFeedForward):
            widths["intermediate_size"] = feed_forward.inner
        if isinstance(feed_forward, BothFeedForward):
            widths["intermediate_size of shared experts"] = feed_forward.dense.inner
        moe = routed_part(feed_forward)
        if moe is not None:
            _require_experts(target, moe)
            widths["intermediate_size of experts"] = moe.inner
    return widths


def _require_experts(target: TargetGeometry, moe: MoeFeedForward) -> None:
    """Raise SpecbuildError for routed experts without a kernel."""
    require_quantized_experts("--weights-dtype", "the model", target.dtype, moe)
    choice = Choice(
        routed=moe.experts,
        top_k=moe.experts_per_token,
        gating=moe.gating,
        biased=moe.choice_bias,
        groups=moe.groups,
        groups_chosen=moe.groups_chosen,
        group_score=moe.group_score,
        scaled=moe.expert_scale,
    )
    unsupported = unknown_choice(choice)
    if unsupported is not None:
        raise SpecbuildError(f"the model's router has {unsupported}; build with --backend cpu")
    if target.hidden > MAX_HIDDEN:
        raise SpecbuildError(
            f"the model routes rows of {target.hidden} values to experts, but CUDA kernels support "
            f"up to {MAX_HIDDEN}; build with --backend cpu"
        )


def _require_indexers(indexer: IndexerGeometry) -> None:
    """Raise SpecbuildError for sizes of indexers without a kernel."""
    if indexer.width % TILE_ROWS or indexer.width > MAX_WIDTH or indexer.heads > MAX_HEADS:
        raise SpecbuildError(
            f"the model's indexers have {indexer.heads} heads of {indexer.width} values, but CUDA "
            f"kernels support up to {MAX_HEADS} of up to {MAX_WIDTH}, in multiples of {TILE_ROWS}; "
            "build with --backend cpu or --no-dsa"
        )


def require_readable_keys(engine_sizes: EngineSizes) -> None:
    """Raise SpecbuildError if SpecPV scores blocks by keys without a summary kernel."""
    chooses = engine_sizes.specpv is not None and engine_sizes.specpv.score == "indexer"
    if chooses and engine_sizes.dsa is not None and engine_sizes.dsa.key_dtype == "fp8":
        raise SpecbuildError(
            "--specpv-score indexer: CUDA kernels summarize bf16 keys, but these are fp8; use dot "
            "or quest, or --dsa-key-dtype bf16"
        )


def require_quantized_caches(engine_sizes: EngineSizes) -> None:
    """Raise SpecbuildError for quantized keys and values that no kernel reads."""
    groups = [g for g in engine_sizes.groups if g.coded and g.name != INDEXER_GROUP]
    if not groups:
        return
    if engine_sizes.specpv is not None:
        raise SpecbuildError(
            "--kv-dtype fp8: CUDA kernels summarize and select SpecPV's blocks by bf16 keys; "
            "remove --specpv or --kv-dtype"
        )
    for group in groups:
        if group.k_width not in CODED_WIDTHS:
            raise SpecbuildError(
                f"--kv-dtype fp8: the cache group {group.name} has heads of {group.k_width}, but "
                f"CUDA kernels support {', '.join(map(str, CODED_WIDTHS))}; remove the option, or "
                "build with --backend cpu"
            )


def require_one_view(engine_sizes: EngineSizes) -> None:
    """Raise SpecbuildError for drafts that the steps of a lossy mode cannot verify."""
    modes = (("SpecPV", engine_sizes.specpv), ("DSA", engine_sizes.dsa))
    mode = next((name for name, config in modes if config is not None), None)
    if mode is not None and len(engine_sizes.model_shapes) > 1:
        raise SpecbuildError(
            f"--draft: got {len(engine_sizes.model_shapes)} drafts, but CUDA engines with {mode} "
            "support one; remove the others, or build with --backend cpu"
        )
    if engine_sizes.host_drafter is not None and mode is not None:
        raise SpecbuildError(
            f"--drafter {engine_sizes.host_drafter.kind}: CUDA engines with {mode} cannot verify "
            "host proposals; remove one of the options, or build with --backend cpu"
        )


def batch_warnings(engine_sizes: EngineSizes) -> tuple[str, ...]:
    """Warn if fewer sequences than the maximum can verify the requested draft in one launch."""
    limits = engine_sizes.limits
    shapes = draft_shapes(next(iter(engine_sizes.model_shapes.values()), NO_DRAFT))
    # Only a requested draft makes the largest shape the default.
    if not shapes or engine_sizes.draft_default != shapes[-1]:
        return ()
    buckets = batch_buckets(limits.max_batch_size)
    max_drafting = max((b for b in buckets if fits(b, shapes[-1], deepest(shapes))), default=0)
    if max_drafting >= limits.max_batch_size:
        return ()
    return (
        f"draft: with {shapes[-1].draft_tokens + 1} rows per sequence only {max_drafting} of "
        f"{limits.max_batch_size} sequences can draft at once, because a launch verifies "
        f"{MAX_DECODE_ROWS} rows; use a smaller draft to include more sequences",
    )
