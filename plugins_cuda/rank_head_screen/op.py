"""RankHeadScreen: HeadScreen with a vocabulary split over ranks; every rank has the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbuild.plugins_cuda.head_screen.lowering import tactics
from specbuild.plugins_cuda.head_screen.op import OP as HEAD_SCREEN
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.rank_head_choose.op import contribution
from specbuild.plugins_cuda.rank_head_choose.op import reference as rank_head_choose
from specbuild.plugins_cuda.rank_head_screen.lowering import lower
from specbuild.plugins_cuda.rank_sum.op import EXCHANGE_ATTRIBUTES, EXCHANGE_INPUTS

if TYPE_CHECKING:
    import torch

# Inputs that affect only which tiles are read.
_SCREEN_INPUTS = ("codes", "errors")
_KEPT = [i for i, spec in enumerate(HEAD_SCREEN.inputs) if spec.name not in _SCREEN_INPUTS]


def reference(
    *inputs: torch.Tensor, contributions: Sequence[torch.Tensor] | None = None, **attributes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``RankHeadChoose``'s choice [R]; its logprob is infinity, as with HeadScreen.

    ``weight``, ``codes`` and ``errors`` have the rank's tokens, which follow those of lower ranks.
    ``contributions`` are the ranks' logits; without them this rank is its own peer.
    """
    import torch

    kept = [inputs[i] for i in _KEPT]
    choice, logprob = rank_head_choose(*kept, contributions=contributions, **attributes)
    return choice, torch.full_like(logprob, float("inf"))


OP = OpSpec(
    name="RankHeadScreen",
    doc="HeadScreen of a vocabulary that ranks share: each rank has the whole one's choice.",
    inputs=(*HEAD_SCREEN.inputs, *EXCHANGE_INPUTS),
    outputs=HEAD_SCREEN.outputs,
    attributes=(*HEAD_SCREEN.attributes, *EXCHANGE_ATTRIBUTES),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=HEAD_SCREEN.traffic,
    contribution=contribution,
)
