"""Routed experts: their weights in engines, and the op that combines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from specbuild.builder.checkpoint.source import TORCH_DTYPES, SourceTensor
from specbuild.builder.families.parts.tensor_shapes import Shapes, prefixed, swiglu_shapes
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward


class ExpertWeights(nn.Module):
    """The weights of all experts [E, in, out] without biases, with interleaved gate and up."""

    def __init__(self, hidden: int, moe: MoeFeedForward) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(moe.experts, hidden, 2 * moe.inner))
        self.down_proj = nn.Parameter(torch.empty(moe.experts, moe.inner, hidden))


def combine_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: ExpertWeights,
    moe: MoeFeedForward,
    *,
    choice_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Combine experts: ``x`` [T, H] and the router's ``logits`` fp32 [T, E] → [T, H]."""
    output: torch.Tensor = torch_op("Moe")(
        x,
        logits,
        weights.gate_up_proj,
        None,
        None,
        weights.down_proj,
        None,
        None,
        choice_bias,
        expert_scale,
        top_k=moe.experts_per_token,
        gating=moe.gating,
        activation=moe.activation.kind,
        groups=moe.groups,
        groups_chosen=moe.groups_chosen,
        group_score=moe.group_score,
        scaling=moe.scaling,
    )
    return output


def expert_shapes(hidden: int, moe: MoeFeedForward) -> Shapes:
    """Return the shapes of separate experts in checkpoints, by names within a layer's MLP."""
    one = swiglu_shapes(hidden, moe.inner)
    shapes: Shapes = {}
    for expert in range(moe.experts):
        shapes |= prefixed(f"experts.{expert}.", one)
    return shapes


def stacked_experts(
    tensors: dict[str, SourceTensor], prefix: str, moe: MoeFeedForward
) -> dict[str, SourceTensor]:
    """Remove the experts from ``tensors`` and return the tensors of :class:`ExpertWeights`.

    Loading one reads experts one at a time. Experts with different dtypes become fp32.
    """

    def pop_experts(part: str) -> list[SourceTensor]:
        return [tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(moe.experts)]

    gates, ups, downs = pop_experts("gate_proj"), pop_experts("up_proj"), pop_experts("down_proj")
    hidden = gates[0].shape[1]

    def gate_up() -> torch.Tensor:
        dtype = TORCH_DTYPES[_common_dtype([*gates, *ups])]
        stacked_weight = torch.empty(moe.experts, hidden, moe.inner, 2, dtype=dtype)
        for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
            stacked_weight[expert, ..., 0], stacked_weight[expert, ..., 1] = (
                gate.load().T,
                up.load().T,
            )
        return stacked_weight.flatten(2)

    def down() -> torch.Tensor:
        dtype = TORCH_DTYPES[_common_dtype(downs)]
        stacked_weight = torch.empty(moe.experts, moe.inner, hidden, dtype=dtype)
        for expert, one in enumerate(downs):
            stacked_weight[expert] = one.load().T
        return stacked_weight

    inner = [one for pair in zip(gates, ups, strict=True) for one in pair]
    stacked = (
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
            experts=tuple(parents),
        )
        for name, parents, load, shape in stacked
    }


def split_experts(tensors: dict[str, SourceTensor], prefix: str, moe: MoeFeedForward) -> None:
    """Replace a layer's experts that are stacked on disk by separate tensors of each expert.

    ``gate_up_proj`` [E, 2·I, H] has gates before ups, ``down_proj`` is [E, H, I]. Tensors of other
    shapes stay, so that the audit reports them.
    """
    fused = {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
    }
    for name, parts in fused.items():
        stacked = tensors.get(f"{prefix}{name}")
        if stacked is None or len(stacked.shape) != 3 or stacked.shape[0] != moe.experts:
            continue
        del tensors[stacked.name]
        rows = stacked.shape[1] // len(parts)
        for expert in range(moe.experts):
            for index, part in enumerate(parts):
                name_of_expert = f"{prefix}{expert}.{part}.weight"
                row_range = slice(index * rows, (index + 1) * rows)
                tensors[name_of_expert] = replace(
                    stacked,
                    name=name_of_expert,
                    shape=(rows, stacked.shape[2]),
                    load=partial(_expert_rows, stacked, expert, row_range),
                    file=None,
                    offset=None,
                    load_as=None,
                    quantized=None,
                )


def _expert_rows(stacked: SourceTensor, expert: int, rows: slice) -> torch.Tensor:
    return stacked.load()[expert, rows]


def _common_dtype(tensors: Sequence[SourceTensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "F32"
