"""TopLogprobs: the log-probability of a chosen token, and the top tokens of rows of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.adjust_logits.op import guided_rows, row_places
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.top_logprobs.lowering import lower
from specbuild.plugins_cuda.traffic import NoTraffic
from specbuild.runtime.engine_dir.plan import ADJUSTS

if TYPE_CHECKING:
    import torch


def reference(
    logits: torch.Tensor,
    raw: torch.Tensor,
    choice: torch.Tensor,
    chosen_logprob: torch.Tensor,
    changes: torch.Tensor,
    forced: torch.Tensor,
    top_count: torch.Tensor,
    row_start: torch.Tensor | None = None,
    *,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probability ``logprob`` fp32 [R] of ``choice`` int32 [R] by its raw logits.

    Sequences have rows as in AdjustLogits. In rows that AdjustLogits does not change, ``logits``
    fp32 [R, V] are the raw logits, and the result is ``chosen_logprob`` fp32 [R], bit for bit. In
    the others ``raw`` fp32 [R, V] are. By ``changes`` and ``forced`` int32 [B] these are the rows
    with the bit ``ADJUSTS``, those that a guide forces, and the one that it masks.

    Also returns the top tokens of each row, ``top_count`` int32 [B] of them, by falling probability
    and then by id: ``top_ids`` int32 [R, most] and their ``top_logprobs``. Both kinds of
    log-probabilities have the same normalization. Entries past the count, and past the vocabulary,
    are −1 and −∞.
    """
    import torch

    sequence, slot, is_used = row_places(changes.shape[0], logits.shape[0], row_start)
    of_row, top_count = (x[sequence].where(is_used, 0) for x in (changes, top_count))
    is_forced, is_masked = guided_rows(of_row, forced[sequence], slot)
    is_changed = ((of_row & ADJUSTS) != 0) | is_forced | is_masked
    logits = torch.where(is_changed.unsqueeze(1), raw, logits)
    logprobs = logits.double().log_softmax(dim=1)
    own = logprobs.gather(1, choice.long().unsqueeze(1)).squeeze(1)
    logprob = torch.where(is_changed, own.float(), chosen_logprob)
    rows, vocab = logits.shape
    ids = torch.full((rows, most), -1, dtype=torch.int32)
    values = torch.full((rows, most), -torch.inf)
    # Ties are decided by logits, because log-probabilities may be rounded to equal values.
    order = torch.sort(logits.float() + 0.0, dim=1, descending=True, stable=True).indices
    for r in range(rows):
        best = order[r, : min(int(top_count[r]), most, vocab)]
        ids[r, : len(best)] = best.int()
        values[r, : len(best)] = (logprobs[r, best] - own[r] + logprob[r]).float()
    return logprob, ids, values


OP = OpSpec(
    name="TopLogprobs",
    doc="Logits to the likeliest tokens of each row, and the log-probability of a chosen one.",
    inputs=(
        TensorSpec("logits", "float32", ("R", "vocab")),
        TensorSpec("raw", "float32", ("R", "vocab")),
        TensorSpec("choice", "int32", ("R",)),
        TensorSpec("chosen_logprob", "float32", ("R",)),
        TensorSpec("changes", "int32", ("B",)),
        TensorSpec("forced", "int32", ("B",)),
        TensorSpec("top_count", "int32", ("B",)),
        TensorSpec("row_start", "int32", ("B1",), optional=True),
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
