"""TopLogprobs: the likeliest tokens of rows of logits, and the log-probability of a chosen one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.top_logprobs.lowering import lower
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def reference(
    logits: torch.Tensor,
    choice: torch.Tensor,
    chosen_logprob: torch.Tensor,
    changes: torch.Tensor,
    top_count: torch.Tensor,
    *,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The natural log-probability ``logprob`` fp32 [R] of ``choice`` int32 [R] by its raw logits.

    Where ``changes`` int32 [R] is 0 that is ``chosen_logprob`` fp32 [R], bit for bit: the choice
    was made from these logits. With it the ``top_count`` int32 [R] likeliest tokens of each row of
    ``logits`` fp32 [R, V], the likeliest first and of equal ones the lower ids: ``top_ids`` int32
    [R, most] and their ``top_logprobs``, relative to the chosen one's. Entries past the count, and
    past the vocabulary, are −1 and −∞.
    """
    import torch

    logprobs = logits.double().log_softmax(dim=1)
    raw = logprobs.gather(1, choice.long().unsqueeze(1)).squeeze(1)
    logprob = torch.where(changes == 0, chosen_logprob, raw.float())
    rows, vocab = logits.shape
    ids = torch.full((rows, most), -1, dtype=torch.int32)
    values = torch.full((rows, most), -torch.inf)
    # Equal ones are told apart by the logits: log-probabilities may be rounded to the same.
    order = torch.sort(logits.float() + 0.0, dim=1, descending=True, stable=True).indices
    for r in range(rows):
        best = order[r, : min(int(top_count[r]), most, vocab)]
        ids[r, : len(best)] = best.int()
        values[r, : len(best)] = (logprobs[r, best] - raw[r] + logprob[r]).float()
    return logprob, ids, values


OP = OpSpec(
    name="TopLogprobs",
    doc="Logits to the likeliest tokens of each row, and the log-probability of a chosen one.",
    inputs=(
        TensorSpec("logits", "float32", ("R", "vocab")),
        TensorSpec("choice", "int32", ("R",)),
        TensorSpec("chosen_logprob", "float32", ("R",)),
        TensorSpec("changes", "int32", ("R",)),
        TensorSpec("top_count", "int32", ("R",)),
    ),
    outputs=(
        TensorSpec("logprob", "float32", ("R",)),
        TensorSpec("top_ids", "int32", ("R", "most")),
        TensorSpec("top_logprobs", "float32", ("R", "most")),
    ),
    attributes=(AttributeSpec("most", int),),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("logits were written by the launch in front and stay in the L2 cache"),
)
