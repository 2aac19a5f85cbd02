"""AdjustLogits: what requests change of their logits, in front of the choice of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.adjust_logits.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic
from specbuild.runtime.engine_dir.plan import ADJUSTS, ENDS_OUTPUT, IN_PROMPT, MASKED_ROW
from specbuild.runtime.guides.grammar import REFUSED
from specbuild.runtime.sampling import MASKED

if TYPE_CHECKING:
    import torch


def counted(
    marks: torch.Tensor,
    token_ids: torch.Tensor | None,
    done: torch.Tensor | None,
    changes: torch.Tensor,
) -> torch.Tensor:
    """``marks`` [R, V] with each row's token counted in, where the row is live and adjusts."""
    marks = marks.clone()
    if token_ids is not None:
        for r, token in enumerate(token_ids.tolist()):
            if changes[r] & ADJUSTS and (done is None or done[r] == 0):
                marks[r, token] += 1
    return marks


def allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """The bits of ``mask`` int32 [R, words] as bool [R, V]; bit v % 32 of word v // 32."""
    import torch

    bits = mask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32)
    return (bits & 1).flatten(1)[:, :vocab] != 0


def reference(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor,
    done: torch.Tensor | None,
    changes: torch.Tensor,
    min_position: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    marks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 1 to 4 of SamplingParams on ``logits`` fp32 [R, V], one row a sequence, and a guide.

    Where ``changes`` int32 [R] has the bit ``ADJUSTS``, ``bias`` fp32 [R, V] is added; at
    ``positions`` below ``min_position`` int32 [R] the tokens marked as ends become MASKED; then
    come the penalties fp32 [R] (``repetition`` 1, ``frequency`` and ``presence`` 0 change
    nothing). Where it has ``MASKED_ROW``, tokens whose bit in ``mask`` int32 [R, words] is 0 become
    REFUSED. Other rows are copied.

    ``marks`` int32 [R, V] has, of each token, how often the output has it, plus ``IN_PROMPT`` and
    ``ENDS_OUTPUT``. The row's own token, ``token_ids`` [R], is counted in first, but for rows that
    are ``done``; where there are none, all of the output is counted already. Returns the logits
    and the marks, in place.
    """
    import torch

    marks = counted(marks, token_ids, done, changes)
    count = (marks & (ENDS_OUTPUT - 1)).float()
    x = logits.float() + bias
    early = ((marks & ENDS_OUTPUT) != 0) & (positions < min_position).unsqueeze(1)
    x = torch.where(early, float(MASKED), x)
    factor = repetition.unsqueeze(1)
    seen = ((marks & IN_PROMPT) != 0) | (count > 0)
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    less = x - frequency.unsqueeze(1) * count - presence.unsqueeze(1)
    x = torch.where(count > 0, less, x)
    x = torch.where((changes & ADJUSTS).bool().unsqueeze(1), x, logits.float())
    refused = (changes & MASKED_ROW).bool().unsqueeze(1) & ~allowed(mask, x.shape[1])
    return torch.where(refused, float(REFUSED), x), marks


_ROW, _OF_VOCAB = ("R",), ("R", "vocab")

OP = OpSpec(
    name="AdjustLogits",
    doc="Biases, masked ends, penalties and guides' masks on one row of logits a sequence.",
    inputs=(
        TensorSpec("logits", "float32", _OF_VOCAB),
        TensorSpec("token_ids", "int32", _ROW, optional=True),
        TensorSpec("positions", "int32", _ROW),
        TensorSpec("done", "int32", _ROW, optional=True),
        TensorSpec("changes", "int32", _ROW),
        TensorSpec("min_position", "int32", _ROW),
        TensorSpec("repetition", "float32", _ROW),
        TensorSpec("frequency", "float32", _ROW),
        TensorSpec("presence", "float32", _ROW),
        TensorSpec("bias", "float32", _OF_VOCAB),
        TensorSpec("mask", "int32", ("R", "words")),
        TensorSpec("marks", "int32", _OF_VOCAB),
    ),
    outputs=(
        TensorSpec("adjusted", "float32", _OF_VOCAB),
        TensorSpec("marks_out", "int32", _OF_VOCAB),
    ),
    attributes=(),
    aliases=(("marks_out", "marks"),),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("reads a few rows as long as the vocabulary, of few sequences"),
)
