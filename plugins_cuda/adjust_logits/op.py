"""AdjustLogits: what requests change of their logits, in front of the choice of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.adjust_logits.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic
from specbuild.runtime.engine_dir.plan import (
    ADJUSTS,
    ENDS_OUTPUT,
    FORCED_ROWS,
    IN_PROMPT,
    MASKED_ROW,
)
from specbuild.runtime.guides.grammar import REFUSED
from specbuild.runtime.sampling import MASKED

if TYPE_CHECKING:
    import torch


def counted(
    marks: torch.Tensor,
    row_tokens: torch.Tensor | None,
    ancestor_bits: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """The marks of each of ``rows`` rows: its sequence's ``marks`` [B, V], and its own path.

    The path are the row's own token and those of its ancestors among the rows of its sequence.
    """
    nodes = rows // marks.shape[0]
    marks = marks.repeat_interleave(nodes, dim=0)
    if row_tokens is None or ancestor_bits is None:
        return marks
    for r in range(rows):
        first = r - r % nodes
        for j in range(nodes):
            if int(ancestor_bits[r, j // 32]) >> j % 32 & 1:
                marks[r, int(row_tokens[first + j])] += 1
    return marks


def allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """The bits of ``mask`` int32 [R, words] as bool [R, V]; bit v % 32 of word v // 32."""
    import torch

    bits = mask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32)
    return (bits & 1).flatten(1)[:, :vocab] != 0


def guided_rows(
    changes: torch.Tensor, forced: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of R rows are forced to the token of the next slot, and which are masked: bool [R]."""
    import torch

    nodes = rows // changes.shape[0]
    slot = torch.arange(rows) % nodes
    of_row = changes.repeat_interleave(nodes)
    first_free = forced.where((changes & FORCED_ROWS) != 0, 0).repeat_interleave(nodes)
    return slot < first_free, ((of_row & MASKED_ROW) != 0) & (slot == first_free)


def reference(
    logits: torch.Tensor,
    row_tokens: torch.Tensor | None,
    ancestor_bits: torch.Tensor | None,
    positions: torch.Tensor,
    changes: torch.Tensor,
    forced: torch.Tensor,
    min_position: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    marks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 1 to 4 of SamplingParams on ``logits`` fp32 [R, V], and a guide's mask, in place.

    Rows b·N1 to b·N1 + N1 − 1 belong to sequence b, N1 = R / B: a tree whose slot 0 is the root.
    Where ``changes`` int32 [B] has the bit ``ADJUSTS``, ``bias`` fp32 [B, V] is added; at
    ``positions`` [R] below ``min_position`` int32 [B] the tokens marked as ends become MASKED; then
    come the penalties fp32 [B] (``repetition`` 1, ``frequency`` and ``presence`` 0 change
    nothing). Other rows are unchanged.

    A guide comes last. Where ``changes`` has ``FORCED_ROWS``, all tokens become REFUSED but that of
    the next slot in the first ``forced`` int32 [B] rows of a chain. Where it has ``MASKED_ROW``,
    tokens whose bit in ``mask`` int32 [B, words] is 0 become REFUSED in the row behind these, which
    is that of the root without them.

    ``marks`` int32 [B, V] has, of each token, how often the output before the root has it, plus
    ``IN_PROMPT`` and ``ENDS_OUTPUT``. The tokens on a row's path are counted too: bit j of
    ``ancestor_bits`` int32 [R, W] stands for the token ``row_tokens`` [R] of slot j, and a row has
    its own bit. Without these two, all of the output is in ``marks``.

    Returns the logits, and ``raw`` fp32 [R, V]: the rows that changed as they were, others
    unspecified.
    """
    import torch

    rows = logits.shape[0]
    nodes = rows // changes.shape[0]

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(nodes, dim=0)

    marks = counted(marks, row_tokens, ancestor_bits, rows)
    count = (marks & (ENDS_OUTPUT - 1)).float()
    x = logits.float() + per_row(bias)
    early = ((marks & ENDS_OUTPUT) != 0) & (positions < per_row(min_position)).unsqueeze(1)
    x = torch.where(early, float(MASKED), x)
    factor = per_row(repetition).unsqueeze(1)
    seen = ((marks & IN_PROMPT) != 0) | (count > 0)
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    less = x - per_row(frequency).unsqueeze(1) * count - per_row(presence).unsqueeze(1)
    x = torch.where(count > 0, less, x)
    x = torch.where((per_row(changes) & ADJUSTS).bool().unsqueeze(1), x, logits.float())
    is_forced, is_masked = guided_rows(changes, forced, rows)
    refused = is_masked.unsqueeze(1) & ~per_row(allowed(mask, x.shape[1]))
    if row_tokens is not None:
        others = torch.arange(x.shape[1]) != row_tokens.roll(-1).unsqueeze(1)
        refused |= is_forced.unsqueeze(1) & others
    return torch.where(refused, float(REFUSED), x), logits.clone()


_OF_ROWS, _OF_SEQUENCES = ("R", "vocab"), ("B", "vocab")
_ROW, _SEQUENCE = ("R",), ("B",)

OP = OpSpec(
    name="AdjustLogits",
    doc="Biases, masked ends, penalties and guides' masks on the rows of trees.",
    inputs=(
        TensorSpec("logits", "float32", _OF_ROWS),
        TensorSpec("row_tokens", "int32", _ROW, optional=True),
        TensorSpec("ancestor_bits", "int32", ("R", "W"), optional=True),
        TensorSpec("positions", "int32", _ROW),
        TensorSpec("changes", "int32", _SEQUENCE),
        TensorSpec("forced", "int32", _SEQUENCE),
        TensorSpec("min_position", "int32", _SEQUENCE),
        TensorSpec("repetition", "float32", _SEQUENCE),
        TensorSpec("frequency", "float32", _SEQUENCE),
        TensorSpec("presence", "float32", _SEQUENCE),
        TensorSpec("bias", "float32", _OF_SEQUENCES),
        TensorSpec("mask", "int32", ("B", "words")),
        TensorSpec("marks", "int32", _OF_SEQUENCES),
    ),
    outputs=(
        TensorSpec("adjusted", "float32", _OF_ROWS),
        TensorSpec("raw", "float32", _OF_ROWS),
    ),
    attributes=(),
    aliases=(("adjusted", "logits"),),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("reads the rows of few sequences, each as long as the vocabulary"),
)
