"""The tensors of a block with MLA, in checkpoints and in the engine's form."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbuild.builder.checkpoint.source import SourceTensor, remade
from specbuild.builder.families.parts.experts import expert_shapes, stacked_experts
from specbuild.builder.families.parts.mla_layer import MlaLayer
from specbuild.builder.families.parts.tensor_shapes import Shapes, prefixed, swiglu_shapes
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    routed_part,
)
from specbuild.runtime.engine_dir.geometry import MlaGeometry


def layer_shapes(layer: MlaLayer) -> Shapes:
    """Return attention and feed-forward without the norms before them, by names in the layer."""
    attention = prefixed("self_attn.", _attention(layer))
    return attention | prefixed("mlp.", feed_forward_shapes(layer.hidden, layer.feed_forward))


def layer_for_engine(
    tensors: dict[str, SourceTensor], prefix: str, layer: MlaLayer, *, interleaved: bool
) -> dict[str, SourceTensor]:
    """Remove the tensors that engines have in another form, and return their new forms.

    ``kv_b_proj`` becomes ``key`` [h, nope, rank] and ``value`` [h, v, rank]. Rotated rows become
    half-split; in ``interleaved`` checkpoints pairs are adjacent. The experts are ``gate_up_proj``
    [E, H, 2·I], with gate and up interleaved, and ``down_proj`` [E, I, H].
    """
    attention, mla = f"{prefix}self_attn.", layer.mla
    converted = _up_projections(tensors.pop(f"{attention}kv_b_proj.weight"), layer.heads, mla)
    if interleaved:
        query = "q_proj" if mla.q_lora_rank is None else "q_b_proj"
        for part, heads in ((query, layer.heads), ("kv_a_proj_with_mqa", 1)):
            name = f"{attention}{part}.weight"
            converted[name] = _half_split(tensors.pop(name), heads, mla.rope_dim)
    moe = routed_part(layer.feed_forward)
    if moe is not None:
        converted |= stacked_experts(tensors, f"{prefix}mlp.experts.", moe)
    return converted


def _attention(layer: MlaLayer) -> Shapes:
    mla, inputs = layer.mla, layer.inputs or layer.hidden
    q_rows = layer.heads * (mla.nope_dim + mla.rope_dim)
    queries: Shapes = {"q_proj.weight": (q_rows, inputs)}
    if mla.q_lora_rank is not None:
        queries = {
            "q_a_proj.weight": (mla.q_lora_rank, inputs),
            "q_a_layernorm.weight": (mla.q_lora_rank,),
            "q_b_proj.weight": (q_rows, mla.q_lora_rank),
        }
    return queries | {
        "kv_a_proj_with_mqa.weight": (mla.entry_width, inputs),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (layer.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
        "o_proj.weight": (layer.hidden, layer.heads * mla.v_dim),
    }


def feed_forward_shapes(hidden: int, feed_forward: FeedForward) -> Shapes:
    """Return the shapes of a dense feed-forward or of experts, by names within it."""
    if isinstance(feed_forward, DenseFeedForward):
        return swiglu_shapes(hidden, feed_forward.inner, bias=feed_forward.bias)
    if isinstance(feed_forward, BothFeedForward):
        inner = swiglu_shapes(hidden, feed_forward.dense.inner)
        if feed_forward.gated:
            shared = prefixed("shared_expert.", inner) | {"shared_expert_gate.weight": (1, hidden)}
        else:
            shared = prefixed("shared_experts.", inner)
        return _moe(hidden, feed_forward.moe) | shared
    return _moe(hidden, feed_forward)


def _moe(hidden: int, moe: MoeFeedForward) -> Shapes:
    shapes: Shapes = {"gate.weight": (moe.experts, hidden)}
    if moe.choice_bias:
        shapes["gate.e_score_correction_bias"] = (moe.experts,)
    return shapes | expert_shapes(hidden, moe)


def _up_projections(tensor: SourceTensor, heads: int, mla: MlaGeometry) -> dict[str, SourceTensor]:
    def part(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        sizes = [mla.nope_dim, mla.v_dim]
        return lambda weight: weight.unflatten(0, (heads, -1)).split(sizes, dim=1)[index]

    stem = tensor.name.removesuffix("weight")
    return {
        f"{stem}{name}": remade(f"{stem}{name}", tensor, part(index))
        for index, name in enumerate(("key", "value"))
    }


def _half_split(tensor: SourceTensor, heads: int, rope_dim: int) -> SourceTensor:
    """Reorder each head's last ``rope_dim`` rows, even ones first."""

    def split(weight: torch.Tensor) -> torch.Tensor:
        by_head = weight.unflatten(0, (heads, -1))
        unrotated, rotated = by_head[:, :-rope_dim], by_head[:, -rope_dim:]
        return torch.cat([unrotated, rotated[:, 0::2], rotated[:, 1::2]], dim=1).flatten(0, 1)

    return remade(tensor.name, tensor, split)
