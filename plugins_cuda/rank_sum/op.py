"""RankSum: an all-reduce of the ranks' partial sums of a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rank_sum.lowering import lower
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch

# Inputs of every op that exchanges data: the inbox of peers, the round count with the time limit,
# and the record of a timeout.
EXCHANGE_INPUTS = (
    TensorSpec("inbox", "int32", ("2", "S", "words", "2")),
    TensorSpec("state", "int32", ("2",)),
    TensorSpec("fault", "int32", ("8",)),
)
EXCHANGE_ATTRIBUTES = (AttributeSpec("ranks", int), AttributeSpec("exchange", int))


def rank_order_sum(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in fp32, rank 0 first."""
    total = contributions[0].float()
    for contribution in contributions[1:]:
        total = total + contribution.float()
    return total


def contribution(partial: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Return the partial sums that this rank sends."""
    return partial


def reference(
    partial: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    inbox: torch.Tensor,  # noqa: ARG001
    state: torch.Tensor,  # noqa: ARG001
    fault: torch.Tensor,  # noqa: ARG001
    *,
    ranks: int,
    exchange: int,  # noqa: ARG001
    contributions: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return ``residual + (Σ partial + bias)`` [T, N], added over ranks in order.

    ``partial`` [T, N] and the sum are fp32. The sum with the bias is rounded to the residual's type
    before the addition, as by ``Linear``. ``contributions`` are the ranks' partial sums; without
    them this rank is its own peer.

    ``inbox`` [2, ranks − 1, words, 2] has words of a value and its round number. ``state`` [2] has
    the number of rounds of earlier programs, and the limit of a wait in ms (0: none). ``exchange``
    is the first of the op's rounds in its program. A kernel that waits longer fills ``fault`` [8]
    with 1, its rank, the peer's rank, ``exchange`` and the round number, and ends.
    """
    import torch

    total = rank_order_sum([partial] * ranks if contributions is None else contributions)
    if bias is not None:
        total = total + bias.float()
    rounded_like = bias if residual is None else residual
    kind = torch.bfloat16 if rounded_like is None else rounded_like.dtype
    y = total.to(kind)
    return y if residual is None else (residual.float() + y.float()).to(kind)


OP = OpSpec(
    name="RankSum",
    doc="y = residual + (the sum of all ranks' partial sums + bias), on every rank.",
    inputs=(
        TensorSpec("partial", "float32", ("T", "N")),
        TensorSpec("bias", "W", ("N",), optional=True),
        TensorSpec("residual", "T", ("T", "N"), optional=True),
        *EXCHANGE_INPUTS,
    ),
    outputs=(TensorSpec("y", "T", ("T", "N")),),
    attributes=EXCHANGE_ATTRIBUTES,
    reference=reference,
    lower=lower,
    contribution=contribution,
    traffic=Weights(multiplied=()),
)
