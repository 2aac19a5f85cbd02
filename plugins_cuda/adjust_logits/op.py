"""AdjustLogits: logit processors of requests, before a token is sampled."""

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


def row_places(
    sequences: int, rows: int, row_start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sequence [R] and the slot [R] of each row, and whether it belongs to one [R].

    Without ``row_start`` [B+1] all sequences have R / B rows. Padding rows get those of sequence 0.
    """
    import torch

    row = torch.arange(rows)
    if row_start is None:
        nodes = rows // sequences
        return row // nodes, row % nodes, torch.ones(rows, dtype=torch.bool)
    sequence = torch.searchsorted(row_start[1:].contiguous(), row.int(), right=True)
    is_used = sequence < sequences
    sequence = sequence.where(is_used, 0)
    return sequence, row - row_start[sequence], is_used


def counted(
    marks: torch.Tensor,
    row_tokens: torch.Tensor | None,
    ancestor_bits: torch.Tensor | None,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return the ``marks`` [R, V] of each row's sequence, plus the tokens of the row's path.

    The path consists of the row's token and those of its ancestors. ``slots`` [R] are the slots of
    the rows in their sequences.
    """
    marks = marks.clone()
    if row_tokens is None or ancestor_bits is None:
        return marks
    for r, slot in enumerate(slots.tolist()):
        for j in range(min(32 * ancestor_bits.shape[1], len(slots) - r + slot)):
            if int(ancestor_bits[r, j // 32]) >> j % 32 & 1:
                marks[r, int(row_tokens[r - slot + j])] += 1
    return marks


def allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the bits of ``mask`` int32 [R, words] as bool [R, V]: bit v % 32 of word v // 32."""
    import torch

    bits = mask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32)
    return (bits & 1).flatten(1)[:, :vocab] != 0


def guided_rows(
    changes: torch.Tensor, forced: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that are forced to the token of the next slot, and the masked ones: bool [R].

    ``changes`` and ``forced`` [R] are those of each row's sequence, ``slots`` [R] its slot there.
    """
    first_free = forced.where((changes & FORCED_ROWS) != 0, 0)
    return slots < first_free, ((changes & MASKED_ROW) != 0) & (slots == first_free)


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
    row_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply steps 1 to 4 of SamplingParams and a guide's mask to ``logits`` fp32 [R, V], in place.

    Rows ``row_start[b]`` to ``row_start[b+1]`` − 1 belong to sequence b: a tree whose slot 0 is the
    root. Rows after those of all sequences do not change. Without ``row_start`` int32 [B+1] each
    sequence has R / B rows.

    If ``changes`` int32 [B] has the bit ``ADJUSTS``, ``bias`` fp32 [B, V] is added. Then, at
    ``positions`` [R] below ``min_position`` int32 [B], tokens marked as ends become MASKED. Then
    the penalties fp32 [B] apply; ``repetition`` 1, ``frequency`` 0 and ``presence`` 0 have no
    effect. Other rows are unchanged.

    The guide is last. If ``changes`` has ``FORCED_ROWS``, then in the first ``forced`` int32 [B]
    rows of a chain all tokens become REFUSED except that of the next slot. If it has
    ``MASKED_ROW``, one row is masked: tokens whose bit in ``mask`` int32 [B, words] is 0 become
    REFUSED. This is the row after the forced ones, or the root.

    ``marks`` int32 [B, V] is the number of occurrences of each token in the output before the root,
    plus ``IN_PROMPT`` and ``ENDS_OUTPUT``. The tokens on a row's path count too: bit j of
    ``ancestor_bits`` int32 [R, W] is the token ``row_tokens`` [R] of slot j, including the row's
    own. Without these two, ``marks`` covers the complete output.

    Returns the logits, and ``raw`` fp32 [R, V]: the original logits of changed rows; other rows are
    unspecified.
    """
    import torch

    sequence, slot, is_used = row_places(changes.shape[0], logits.shape[0], row_start)
    changes = changes[sequence].where(is_used, 0)
    marks = counted(marks[sequence], row_tokens, ancestor_bits, slot)
    count = (marks & (ENDS_OUTPUT - 1)).float()
    x = logits.float() + bias[sequence]
    early = ((marks & ENDS_OUTPUT) != 0) & (positions < min_position[sequence]).unsqueeze(1)
    x = torch.where(early, float(MASKED), x)
    factor = repetition[sequence].unsqueeze(1)
    seen = ((marks & IN_PROMPT) != 0) | (count > 0)
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    less = x - frequency[sequence].unsqueeze(1) * count - presence[sequence].unsqueeze(1)
    x = torch.where(count > 0, less, x)
    x = torch.where((changes & ADJUSTS).bool().unsqueeze(1), x, logits.float())
    is_forced, is_masked = guided_rows(changes, forced[sequence], slot)
    refused = is_masked.unsqueeze(1) & ~allowed(mask, x.shape[1])[sequence]
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
        TensorSpec("row_start", "int32", ("B1",), optional=True),
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
