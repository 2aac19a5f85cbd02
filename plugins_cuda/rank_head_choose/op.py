"""RankHeadChoose: HeadChoose with a vocabulary split over ranks; every rank has the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbuild.plugins_cuda.choose.op import reference as choose
from specbuild.plugins_cuda.head_choose.op import OP as HEAD_CHOOSE
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.rank_head_choose.lowering import lower
from specbuild.plugins_cuda.rank_sum.op import EXCHANGE_ATTRIBUTES, EXCHANGE_INPUTS
from specbuild.plugins_cuda.rms_head.lowering import tactics
from specbuild.plugins_cuda.rms_head.op import reference as rms_head

if TYPE_CHECKING:
    import torch


def contribution(
    *inputs: torch.Tensor,
    eps: float,
    rounding: str,
    divisor: float = 1.0,
    cap: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """Return the logits fp32 [R, V / ranks] of a rank's tokens, from which all its words follow."""
    x, logit_rows, norm, weight = inputs[:4]
    return rms_head(
        x, logit_rows, norm, weight, eps=eps, rounding=rounding, divisor=divisor, cap=cap
    )


def reference(
    *inputs: torch.Tensor,
    ranks: int,
    exchange: int,
    contributions: Sequence[torch.Tensor] | None = None,
    **attributes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``HeadChoose`` of all ranks' logits, in their order: choice [R], its logprob fp32 [R].

    ``weight`` [tiles, …] has the rank's tokens, which follow those of lower ranks. The noise of a
    token depends on its index in the complete vocabulary. ``contributions`` are the ranks' logits;
    without them this rank is its own peer.
    """
    import torch

    del exchange
    if contributions is None:
        contributions = [contribution(*inputs, **attributes)] * ranks
    temperature, seed, position = inputs[4:7]
    top_k, top_p = torch.zeros_like(seed), torch.ones_like(temperature)
    logits = torch.cat(list(contributions), dim=1)
    return choose(logits, temperature, top_k, top_p, seed, position)


OP = OpSpec(
    name="RankHeadChoose",
    doc="HeadChoose of a vocabulary that ranks share: each rank has the whole one's choice.",
    inputs=(*HEAD_CHOOSE.inputs, *EXCHANGE_INPUTS),
    outputs=HEAD_CHOOSE.outputs,
    attributes=(*HEAD_CHOOSE.attributes, *EXCHANGE_ATTRIBUTES),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=HEAD_CHOOSE.traffic,
    contribution=contribution,
)
