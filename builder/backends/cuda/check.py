"""What CUDA kernels can compute of a model; the rest is refused before any work."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.backends.cuda.kernel_limits import (
    require_coded_experts,
    require_heads,
    require_mla,
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

# Parts that fusions express by those that kernels have.
_FUSED = frozenset(
    {
        *("all heads", "growth", "gelu", "multipliers", "output norms", "partial", "scale"),
        *("unrotated", "value norm", "window heads", "window rope"),
    }
)


def require_cuda_support(target: TargetGeometry, draft: DraftGeometry | None) -> None:
    """SpecbuildError naming what this target or draft has that no CUDA kernel computes."""
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
    """SpecbuildError naming what no kernel attends with, where caches hold keys, or latents that
    came later."""
    widest = max(target.latent_dims, default=0)
    if widest > MAX_REBUILT:
        raise SpecbuildError(
            f"the model's layers cache latents of up to {widest} values (mla_kv.safetensors), CUDA "
            f"kernels rebuild keys of up to {MAX_REBUILT}; use a lower --rank in retrofit, or "
            "build with --backend cpu or --no-mla"
        )
    require_heads("model", target)
    local = target.window_heads
    if local is not None:
        alone = replace(target, window_heads=None, kv_heads=local.kv_heads, head_dim=local.head_dim)
        require_heads("model", alone)


def _require_states(delta: GatedDelta) -> None:
    """SpecbuildError naming widths of states that no kernel holds."""
    refused = refused_widths(delta.key_width, delta.value_width)
    if refused is not None:
        raise SpecbuildError(
            f"the model's recurrent states have {refused}; build with --backend cpu"
        )
    require_tiles("model", rows={}, columns={"width of all recurrent values": delta.values})


def _require_no_lists(target: TargetGeometry) -> None:
    """SpecbuildError for indexers beside a model's own latents."""
    if target.indexer is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type} with indexers (DSA): CUDA kernels of absorbed "
            "queries take no lists of tokens; build with --backend cpu or --no-dsa"
        )


def _require_feed_forwards(target: TargetGeometry) -> dict[str, int]:
    """The inner widths of all layers by name; SpecbuildError naming what no kernel computes."""
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
    """SpecbuildError naming what no kernel computes of routed experts."""
    require_coded_experts("--weights-dtype", "the model", target.dtype, moe)
    choice = Choice(
        routed=moe.experts,
        top_k=moe.experts_per_token,
        gating=moe.gating,
        biased=moe.choice_bias,
        groups=moe.groups,
        groups_chosen=moe.groups_chosen,
        group_score=moe.group_score,
    )
    wrong = unknown_choice(choice)
    if wrong is not None:
        raise SpecbuildError(f"the model's router has {wrong}; build with --backend cpu")
    if target.hidden > MAX_HIDDEN:
        raise SpecbuildError(
            f"the model routes rows of {target.hidden} values to experts, CUDA kernels take up to "
            f"{MAX_HIDDEN}; build with --backend cpu"
        )


def _require_indexers(indexer: IndexerGeometry) -> None:
    """SpecbuildError naming sizes that no kernel scores."""
    if indexer.width % TILE_ROWS or indexer.width > MAX_WIDTH or indexer.heads > MAX_HEADS:
        raise SpecbuildError(
            f"the model's indexers have {indexer.heads} heads of {indexer.width} values, CUDA "
            f"kernels take up to {MAX_HEADS} of up to {MAX_WIDTH}, in multiples of {TILE_ROWS}; "
            "build with --backend cpu or --no-dsa"
        )


def require_readable_keys(engine_sizes: EngineSizes) -> None:
    """SpecbuildError where blocks are chosen by keys that no kernel summarises."""
    chooses = engine_sizes.specpv is not None and engine_sizes.specpv.score == "indexer"
    if chooses and engine_sizes.dsa is not None and engine_sizes.dsa.key_dtype == "fp8":
        raise SpecbuildError(
            "--specpv-score indexer: CUDA kernels summarise keys in bf16, these are fp8; take dot "
            "or quest, or --dsa-key-dtype bf16"
        )


def require_coded_caches(engine_sizes: EngineSizes) -> None:
    """SpecbuildError where keys and values are to be codes, which no kernel reads so."""
    groups = [g for g in engine_sizes.groups if g.coded and g.name != INDEXER_GROUP]
    if not groups:
        return
    if engine_sizes.specpv is not None:
        raise SpecbuildError(
            "--kv-dtype fp8: CUDA kernels summarise and choose SpecPV's blocks by keys in bf16; "
            "leave --specpv or --kv-dtype out"
        )
    for group in groups:
        if group.k_width not in CODED_WIDTHS:
            raise SpecbuildError(
                f"--kv-dtype fp8: the cache group {group.name} has heads of {group.k_width}, CUDA "
                f"kernels read codes of {', '.join(map(str, CODED_WIDTHS))}; leave it out, or "
                "build with --backend cpu"
            )


def require_one_view(engine_sizes: EngineSizes) -> None:
    """SpecbuildError for drafts that a lossy mode's steps do not verify."""
    modes = (("SpecPV", engine_sizes.specpv), ("DSA", engine_sizes.dsa))
    mode = next((name for name, config in modes if config is not None), None)
    if mode is not None and len(engine_sizes.model_shapes) > 1:
        raise SpecbuildError(
            f"--draft is given {len(engine_sizes.model_shapes)} times: CUDA engines with {mode} "
            "hold one draft model; leave the others out, or build with --backend cpu"
        )
    if engine_sizes.host_drafter is not None and mode is not None:
        raise SpecbuildError(
            f"--drafter {engine_sizes.host_drafter.kind}: CUDA engines with {mode} have no "
            "steps that verify what the host proposes; leave one of both out, or build with "
            "--backend cpu"
        )


def batch_warnings(engine_sizes: EngineSizes) -> tuple[str, ...]:
    """A draft that was asked for and that fewer sequences can verify together than may decode."""
    limits = engine_sizes.limits
    shapes = draft_shapes(next(iter(engine_sizes.model_shapes.values()), NO_DRAFT))
    # The largest draft is the default only where it was asked for.
    if not shapes or engine_sizes.draft_default != shapes[-1]:
        return ()
    buckets = batch_buckets(limits.max_batch_size)
    most = max((b for b in buckets if fits(b, shapes[-1], deepest(shapes))), default=0)
    if most >= limits.max_batch_size:
        return ()
    return (
        f"draft: with {shapes[-1].draft_tokens + 1} rows a sequence only {most} of "
        f"{limits.max_batch_size} sequences can draft together, since a launch verifies "
        f"{MAX_DECODE_ROWS} rows; a smaller draft lets more of them",
    )
