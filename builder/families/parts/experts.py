"""Routed experts: their weights as engines hold them, and the op that mixes them."""

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
    *,
    choice_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
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
        expert_scale,
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


def split_experts(tensors: dict[str, SourceTensor], prefix: str, moe: MoeFeedForward) -> None:
    """Replaces the experts of a layer that are fused on disk by every expert's own tensors.

    ``gate_up_proj`` [E, 2·I, H] has gates above ups, ``down_proj`` is [E, H, I]. Those of other
    shapes stay, for the audit to name.
    """
    fused = {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
    }
    for name, parts in fused.items():
        whole = tensors.get(f"{prefix}{name}")
        if whole is None or len(whole.shape) != 3 or whole.shape[0] != moe.experts:
            continue
        del tensors[whole.name]
        rows = whole.shape[1] // len(parts)
        for expert in range(moe.experts):
            for place, part in enumerate(parts):
                own = f"{prefix}{expert}.{part}.weight"
                cut = slice(place * rows, (place + 1) * rows)
                tensors[own] = replace(
                    whole,
                    name=own,
                    shape=(rows, whole.shape[2]),
                    load=partial(_expert_rows, whole, expert, cut),
                    file=None,
                    offset=None,
                    load_as=None,
                    quantized=None,
                )


def _expert_rows(whole: SourceTensor, expert: int, rows: slice) -> torch.Tensor:
    return whole.load()[expert, rows]


def _common_dtype(tensors: Sequence[SourceTensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "F32"
