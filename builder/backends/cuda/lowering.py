"""The CUDA lowering: the list of passes from portable graphs to graphs of fused ops.

Inputs and outputs keep their names. Pools and hidden states are bf16. A page table has the axes
[B, G, P], without layers. A target that is built with a draft also takes ``captured_blank``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.capture import drop_mask_state, fuse_captures
from specbuild.builder.backends.cuda.fusions.checkpoint_weights import (
    QuantizedWeights,
    keep_quantized,
)
from specbuild.builder.backends.cuda.fusions.clustered_head import fuse_clustered_head
from specbuild.builder.backends.cuda.fusions.draft_input import (
    fuse_draft_input,
    fuse_output_norm,
    fuse_state_norms,
    fuse_unfused_norm,
)
from specbuild.builder.backends.cuda.fusions.embed import fuse_embed
from specbuild.builder.backends.cuda.fusions.gated_delta import fuse_gated_delta
from specbuild.builder.backends.cuda.fusions.gates import fuse_gate
from specbuild.builder.backends.cuda.fusions.head import fuse_head
from specbuild.builder.backends.cuda.fusions.indexer import (
    fuse_indexer,
    unstack_violations,
)
from specbuild.builder.backends.cuda.fusions.known_ops import only_known_ops
from specbuild.builder.backends.cuda.fusions.latent import fuse_latent
from specbuild.builder.backends.cuda.fusions.layer_inputs import (
    fuse_layer_gate,
    fuse_layer_norms,
)
from specbuild.builder.backends.cuda.fusions.linear import fuse_linear
from specbuild.builder.backends.cuda.fusions.low_rank import fuse_low_rank
from specbuild.builder.backends.cuda.fusions.moe import fuse_moe
from specbuild.builder.backends.cuda.fusions.page_tables import unstack_page_tables
from specbuild.builder.backends.cuda.fusions.qkv import fuse_context, fuse_qkv
from specbuild.builder.backends.cuda.fusions.quantize_weights import quantize_weights
from specbuild.builder.backends.cuda.fusions.swiglu import fuse_swiglu
from specbuild.builder.backends.cuda.fusions.tied_tables import share_tied_tables
from specbuild.builder.backends.cuda.fusions.unrotated import rotate_by_zero
from specbuild.builder.backends.cuda.shard.target import shard_target
from specbuild.builder.graph.passes.cleanup import remove_unused
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.plugins_cuda.linear.storage import BF16, storage_named
from specbuild.runtime.engine_dir.drafters.record import DRAFT_MODEL_ROLES, own_name
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS


def _everywhere(rule: Callable[[ir.Graph, ir.Node], bool]) -> Callable[[ir.Model], int]:
    """Return a pass that tries a rule on every node, then removes the replaced nodes."""

    def run(model: ir.Model) -> int:
        applied = sum(rule(model.graph, node) for node in list(model.graph))
        remove_unused(model)
        return applied

    return run


CUDA_PASSES = (
    GraphPass("drop-mask-state", drop_mask_state),
    GraphPass("unstack-page-tables", unstack_page_tables),
    GraphPass("unstack-violations", unstack_violations),
    GraphPass("rotate-by-zero", _everywhere(rotate_by_zero)),
    GraphPass("fuse-gated-delta", _everywhere(fuse_gated_delta)),
    GraphPass("fuse-indexer", _everywhere(fuse_indexer)),
    GraphPass("fuse-qkv", _everywhere(fuse_qkv)),
    GraphPass("fuse-context", _everywhere(fuse_context)),
    GraphPass("fuse-latent", _everywhere(fuse_latent)),
    GraphPass("fuse-low-rank", _everywhere(fuse_low_rank)),
    GraphPass("fuse-moe", _everywhere(fuse_moe)),
    GraphPass("fuse-layer-norms", _everywhere(fuse_layer_norms)),
    GraphPass("fuse-layer-gates", _everywhere(fuse_layer_gate)),
    GraphPass("fuse-gates", _everywhere(fuse_gate)),
    GraphPass("fuse-swiglu", _everywhere(fuse_swiglu)),
    GraphPass("fuse-draft-input", _everywhere(fuse_draft_input)),
    GraphPass("fuse-state-norms", _everywhere(fuse_state_norms)),
    GraphPass("fuse-head", _everywhere(fuse_head)),
    GraphPass("fuse-clustered-head", _everywhere(fuse_clustered_head)),
    GraphPass("fuse-linear", _everywhere(fuse_linear)),
    GraphPass("fuse-output-norms", _everywhere(fuse_output_norm)),
    GraphPass("fuse-unfused-norms", _everywhere(fuse_unfused_norm)),
    GraphPass("fuse-embed", _everywhere(fuse_embed)),
    GraphPass("fuse-captures", fuse_captures),
    GraphPass("remove-unused", remove_unused),
    GraphPass("only-known-ops", only_known_ops),
)

_DRAFT_ROLES = {own_name(group, role) for group in DRAFT_GROUPS for role in DRAFT_MODEL_ROLES}


def shard_pass(ranks: int) -> GraphPass:
    """Return the pass that converts a target's graph to that of one of ``ranks`` ranks."""
    return GraphPass("shard-target", partial(shard_target, ranks=ranks))


def cuda_passes(
    role: str,
    *,
    draft_dtype: str,
    weights_dtype: str = "bf16",
    tied: bool = False,
    quantized: QuantizedWeights | None = None,
    ranks: int = 1,
) -> tuple[GraphPass, ...]:
    """Return the passes of a role's graph; a draft's weights are stored as ``draft_dtype``.

    The target's weights are stored as ``weights_dtype``, or quantized as in the checkpoint if
    ``quantized`` collects them. ``tied`` states that the embedding is also the head. ``ranks`` GPUs
    share the target, and each has the full drafts.
    """
    storage = storage_named(draft_dtype if role in _DRAFT_ROLES else weights_dtype)
    *fusions, unused, known = CUDA_PASSES
    last = [GraphPass("share-tied-tables", partial(share_tied_tables, tied=tied))]
    if storage is BF16 and quantized is not None and role not in _DRAFT_ROLES:
        last.append(GraphPass("keep-quantized-weights", partial(keep_quantized, weights=quantized)))
    # A checkpoint's quantized values are split without change. Parts of bf16 weights are quantized
    # after the split.
    if ranks > 1 and role == "target":
        last.append(shard_pass(ranks))
    if storage is not BF16:
        quantize = partial(quantize_weights, storage=storage)
        last.append(GraphPass("quantize-weights", quantize))
    return (*fusions, *last, unused, known)
