"""Routed experts: their weights as engines hold them, and the op that mixes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specbuild.builder.checkpoint.source import TORCH_DTYPES, SourceTensor
from specbuild.builder.families.parts.tensor_shapes import Shapes, prefixed, swiglu_shapes
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward


class ExpertWeights(nn.Module):
    """The weights of all experts [E, in, out], without biases; gate and up stand interleaved."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(moe.experts, hidden, 2 * moe.inner))
        self.down_proj = nn.Parameter(torch.empty(moe.experts, moe.inner, hidden))


def mixed_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: ExpertWeights,
    moe: MoeFeedForward,
    choice_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [T, H] and the router's ``logits`` fp32 [T, E] → [T, H]."""
    mixed: torch.Tensor = torch_op("Moe")(
        x,
        logits,
        weights.gate_up_proj,
        None,
        None,
        weights.down_proj,
        None,
        None,
        choice_bias,
        top_k=moe.experts_per_token,
        gating=moe.gating,
        activation=moe.activation.kind,
        groups=moe.groups,
        groups_chosen=moe.groups_chosen,
        group_score=moe.group_score,
        scaling=moe.scaling,
    )
    return mixed


def expert_shapes(hidden: int, moe: MoeFeedForward) -> Shapes:
    """Every expert's own tensors, as checkpoints have them, by names within a layer's MLP."""
    one = swiglu_shapes(hidden, moe.inner)
    shapes: Shapes = {}
    for expert in range(moe.experts):
        shapes |= prefixed(f"experts.{expert}.", one)
    return shapes


def stacked_experts(
    tensors: dict[str, SourceTensor], prefix: str, moe: MoeFeedForward
) -> dict[str, SourceTensor]:
    """Takes the experts' own tensors out of ``tensors``; :class:`ExpertWeights` of them.

    Loading one reads an expert at a time into its place. Of several types they become fp32.
    """

    def taken(part: str) -> list[SourceTensor]:
        return [tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(moe.experts)]

    gates, ups, downs = taken("gate_proj"), taken("up_proj"), taken("down_proj")
    hidden = gates[0].shape[1]
    inner = [*gates, *ups]

    def gate_up() -> torch.Tensor:
        dtype = TORCH_DTYPES[_common_dtype(inner)]
        whole = torch.empty(moe.experts, hidden, moe.inner, 2, dtype=dtype)
        for place, (gate, up) in enumerate(zip(gates, ups, strict=True)):
            whole[place, ..., 0], whole[place, ..., 1] = gate.load().T, up.load().T
        return whole.flatten(2)

    def down() -> torch.Tensor:
        dtype = TORCH_DTYPES[_common_dtype(downs)]
        whole = torch.empty(moe.experts, moe.inner, hidden, dtype=dtype)
        for place, one in enumerate(downs):
            whole[place] = one.load().T
        return whole

    made = (
        ("gate_up_proj", inner, gate_up, (moe.experts, hidden, 2 * moe.inner)),
        ("down_proj", downs, down, (moe.experts, moe.inner, hidden)),
    )
    return {
        f"{prefix}{name}": SourceTensor(
            name=f"{prefix}{name}",
            dtype=_common_dtype(parents),
            shape=shape,
            sources=tuple(source for parent in parents for source in parent.sources),
            load=load,
            file=None,
            offset=None,
        )
        for name, parents, load, shape in made
    }


def _common_dtype(tensors: Sequence[SourceTensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "F32"
