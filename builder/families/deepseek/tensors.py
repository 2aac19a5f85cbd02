"""The tensors of a DeepSeek on disk, and the forms in which an engine's graphs name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor
from specbuild.builder.families.parts.experts import expert_shapes, stacked_experts
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    prefixed,
    swiglu_shapes,
    target_shapes,
)
from specbuild.runtime.engine_dir.geometry import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MlaGeometry,
    MoeFeedForward,
    TargetGeometry,
    routed_part,
)


def deepseek_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Name on disk → shape and dtypes."""
    assert g.mla is not None
    mla = g.mla

    def layer(index: int) -> Shapes:
        attention = prefixed("self_attn.", _attention(g, mla))
        return attention | prefixed("mlp.", _feed_forward(g.hidden, g.feed_forward(index)))

    shapes = target_shapes(g, layer)
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def for_engine(
    tensors: dict[str, SourceTensor], g: TargetGeometry, *, interleaved: bool
) -> dict[str, SourceTensor]:
    """Audited tensors in the engine's forms, each made when it is loaded.

    ``kv_b_proj`` becomes ``key`` [h, nope, rank] and ``value`` [h, v, rank]. Rows that RoPE turns
    stand half-split, in ``interleaved`` checkpoints side by side. The experts of a layer are
    ``gate_up_proj`` [E, H, 2·I], gate and up interleaved, and ``down_proj`` [E, I, H].
    """
    assert g.mla is not None
    made = dict(tensors)
    for index in range(g.layers):
        attention = f"model.layers.{index}.self_attn."
        made |= _up_projections(made.pop(f"{attention}kv_b_proj.weight"), g.q_heads, g.mla)
        if interleaved:
            query = "q_proj" if g.mla.q_lora_rank is None else "q_b_proj"
            for part, heads in ((query, g.q_heads), ("kv_a_proj_with_mqa", 1)):
                name = f"{attention}{part}.weight"
                made[name] = _half_split(made[name], heads, g.mla.rope_dim)
        moe = routed_part(g.feed_forward(index))
        if moe is not None:
            made |= stacked_experts(made, f"model.layers.{index}.mlp.experts.", moe)
    return made


def _attention(g: TargetGeometry, mla: MlaGeometry) -> Shapes:
    q_rows = g.q_heads * (mla.nope_dim + mla.rope_dim)
    queries: Shapes = {"q_proj.weight": (q_rows, g.hidden)}
    if mla.q_lora_rank is not None:
        queries = {
            "q_a_proj.weight": (mla.q_lora_rank, g.hidden),
            "q_a_layernorm.weight": (mla.q_lora_rank,),
            "q_b_proj.weight": (q_rows, mla.q_lora_rank),
        }
    return queries | {
        "kv_a_proj_with_mqa.weight": (mla.entry_width, g.hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (g.q_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
        "o_proj.weight": (g.hidden, g.q_heads * mla.v_dim),
    }


def _feed_forward(hidden: int, feed_forward: FeedForward) -> Shapes:
    if isinstance(feed_forward, DenseFeedForward):
        return swiglu_shapes(hidden, feed_forward.inner)
    if isinstance(feed_forward, BothFeedForward):
        shared = prefixed("shared_experts.", swiglu_shapes(hidden, feed_forward.dense.inner))
        return _moe(hidden, feed_forward.moe) | shared
    return _moe(hidden, feed_forward)


def _moe(hidden: int, moe: MoeFeedForward) -> Shapes:
    shapes: Shapes = {"gate.weight": (moe.experts, hidden)}
    if moe.choice_bias:
        shapes["gate.e_score_correction_bias"] = (moe.experts,)
    return shapes | expert_shapes(hidden, moe)


def _made(
    name: str, parents: Sequence[SourceTensor], make: Callable[..., torch.Tensor]
) -> SourceTensor:
    """What ``make(*parents)`` gives, in fp32 where their types differ.

    The shape is found on the meta device.
    """
    alike = len({parent.dtype for parent in parents}) == 1
    blanks = [torch.empty(parent.shape, device="meta") for parent in parents]

    def load() -> torch.Tensor:
        loaded = [parent.load() for parent in parents]
        return make(*(loaded if alike else [part.float() for part in loaded]))

    return SourceTensor(
        name=name,
        dtype=parents[0].dtype if alike else "F32",
        shape=tuple(make(*blanks).shape),
        sources=tuple(source for parent in parents for source in parent.sources),
        load=load,
        file=None,
        offset=None,
    )


def _up_projections(tensor: SourceTensor, heads: int, mla: MlaGeometry) -> dict[str, SourceTensor]:
    def part(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        sizes = [mla.nope_dim, mla.v_dim]
        return lambda weight: weight.unflatten(0, (heads, -1)).split(sizes, dim=1)[place]

    stem = tensor.name.removesuffix("weight")
    return {
        f"{stem}{name}": _made(f"{stem}{name}", [tensor], part(place))
        for place, name in enumerate(("key", "value"))
    }


def _half_split(tensor: SourceTensor, heads: int, rope_dim: int) -> SourceTensor:
    """The rows of each head's last ``rope_dim`` outputs, even ones first."""

    def split(weight: torch.Tensor) -> torch.Tensor:
        by_head = weight.unflatten(0, (heads, -1))
        kept, turned = by_head[:, :-rope_dim], by_head[:, -rope_dim:]
        return torch.cat([kept, turned[:, 0::2], turned[:, 1::2]], dim=1).flatten(0, 1)

    return _made(tensor.name, [tensor], split)
