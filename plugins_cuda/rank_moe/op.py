"""RankMoe: RmsMoe of experts whose inner width is split over ranks; it exchanges the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.rank_moe.lowering import lower, tactics
from specbuild.plugins_cuda.rank_sum.op import (
    EXCHANGE_ATTRIBUTES,
    EXCHANGE_INPUTS,
    rank_order_sum,
)
from specbuild.plugins_cuda.rms_moe.op import OP as RMS_MOE
from specbuild.plugins_cuda.rms_moe.op import experts_sum

if TYPE_CHECKING:
    import torch

# The inputs of RmsMoe come first.
_INPUTS = len(RMS_MOE.inputs)


def contribution(
    *inputs: torch.Tensor | None, ranks: int, exchange: int, residual: int = 1, **attributes: Any
) -> torch.Tensor:
    """Return the fp32 sum of each row's experts over this rank's part of their width."""
    del ranks, exchange, residual
    return experts_sum(inputs[:_INPUTS], **attributes)


def reference(
    *inputs: torch.Tensor | None,
    ranks: int,
    exchange: int,
    contributions: Sequence[torch.Tensor] | None = None,
    **attributes: Any,
) -> torch.Tensor:
    """Return ``x + Σ moe(rms(x))`` [T, H], added over ranks in order, rounded before the residual.

    Inputs and attributes are those of RmsMoe (``residual`` is 1), then those of RankSum. The router
    is equal on all ranks; ``down_bias`` is complete on one of them and zero on the others.
    ``contributions`` are the sums of the ranks; without them this rank is its own peer.
    """
    x = inputs[0]
    assert x is not None
    own = contribution(*inputs, ranks=ranks, exchange=exchange, **attributes)
    total = rank_order_sum([own] * ranks if contributions is None else contributions)
    return x + total.to(x.dtype)


OP = OpSpec(
    name="RankMoe",
    doc="x + the sum of all ranks' moe(rms(x)), experts packed as RmsMoe's.",
    inputs=(*RMS_MOE.inputs, *EXCHANGE_INPUTS),
    outputs=RMS_MOE.outputs,
    attributes=(*RMS_MOE.attributes, *EXCHANGE_ATTRIBUTES),
    reference=reference,
    lower=lower,
    tactics=tactics,
    routing=RMS_MOE.routing,
    traffic=RMS_MOE.traffic,
    contribution=contribution,
)
