"""RankAdvance: the last op of a program whose ops exchange data between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rank_advance.lowering import lower
from specbuild.plugins_cuda.traffic import STATE_ONLY

if TYPE_CHECKING:
    import torch


def reference(state: torch.Tensor, *, rounds: int) -> torch.Tensor:
    """Return ``state`` [2] with ``rounds`` added to its first word, modulo 2³²."""
    moved = state.clone()
    count = (int(state[0]) + rounds + 2**31) % 2**32 - 2**31
    moved[0] = count
    return moved


OP = OpSpec(
    name="RankAdvance",
    doc="Counts the rounds of a program's exchanges: the next program's begin behind them.",
    inputs=(TensorSpec("state", "int32", ("2",)),),
    outputs=(TensorSpec("state_out", "int32", ("2",)),),
    attributes=(AttributeSpec("rounds", int),),
    reference=reference,
    aliases=(("state_out", "state"),),
    lower=lower,
    traffic=STATE_ONLY,
)
