"""The block of an MTP layer, of the target's kind: with MLA or with keys and values."""

from __future__ import annotations

from torch import nn

from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.parts.attention import GroupedAttention
from specbuild.builder.families.parts.experts import stacked_experts
from specbuild.builder.families.parts.grouped_model import rounded_feed_forward
from specbuild.builder.families.parts.grouped_tensors import split_gate
from specbuild.builder.families.parts.llama import norm_module
from specbuild.builder.families.parts.mla_layer import MlaLayer, feed_forward_module
from specbuild.builder.families.parts.mla_tensors import (
    feed_forward_shapes,
    layer_for_engine,
    layer_shapes,
)
from specbuild.builder.families.parts.target import GraphSizes
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    grouped_attention_shapes,
    prefixed,
)
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.feed_forward import BothFeedForward, routed_part
from specbuild.runtime.engine_dir.geometry import MlaGeometry, TargetGeometry


def block_parts(
    d: MtpGeometry, target: TargetGeometry
) -> tuple[tuple[nn.Module, nn.Module], nn.Module, nn.Module]:
    """Return the parts: both norms, attention, feed-forward."""
    if d.mla is not None:
        return _latent_layer(d, d.mla).parts()
    norms = norm_module(target.norm, d.hidden), norm_module(target.norm, d.hidden)
    last = max(set(range(target.layers)) - set(target.linear_layers))
    sizes = GraphSizes(d.aux_layers, d.max_positions)
    attention = GroupedAttention(target, last, sizes)
    is_gated = isinstance(d.feed_forward, BothFeedForward) and d.feed_forward.gated
    module = rounded_feed_forward if is_gated else feed_forward_module
    return norms, attention, module(d.hidden, d.feed_forward)


def block_shapes(d: MtpGeometry, target: TargetGeometry) -> Shapes:
    """Return the shapes of its tensors except norms in a checkpoint, by names within the layer."""
    if d.mla is not None:
        return layer_shapes(_latent_layer(d, d.mla))
    mlp = prefixed("mlp.", feed_forward_shapes(d.hidden, d.feed_forward))
    return grouped_attention_shapes(target) | mlp


def block_for_engine(d: MtpGeometry, tensors: dict[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return audited tensors with the names and forms of an engine's graphs."""
    converted = dict(tensors)
    if d.mla is not None:
        layer = _latent_layer(d, d.mla)
        return converted | layer_for_engine(converted, "", layer, interleaved=d.rope.interleaved)
    moe, query = routed_part(d.feed_forward), "self_attn.q_proj.weight"
    if converted[query].shape[0] == 2 * d.q_heads * d.key_width:
        converted |= split_gate(converted.pop(query), d.q_heads)
    return converted if moe is None else converted | stacked_experts(converted, "mlp.experts.", moe)


def _latent_layer(d: MtpGeometry, mla: MlaGeometry) -> MlaLayer:
    return MlaLayer(d.hidden, d.q_heads, mla, d.rms_eps, d.feed_forward)
