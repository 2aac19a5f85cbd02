"""ExtendInputs: the rows with which the draft ingests tokens that the target has committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.extend_inputs.lowering import lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def pool_slot(page_table: torch.Tensor, slot: int, page_size: int, *, row: int, live: bool) -> int:
    """Return the pool slot of view slot ``slot`` of a sequence with this page table [P].

    A row that is not ``live``, or is past the table, gets a slot of page 0 that depends on the row.
    Nothing reads page 0.
    """
    page = slot // page_size
    if not live or page >= page_table.shape[0]:
        return row % page_size
    return int(page_table[page]) * page_size + slot % page_size


def reference(
    length: torch.Tensor,
    done: torch.Tensor,
    pending_count: torch.Tensor,
    pending_tokens: torch.Tensor,
    pending_captured: torch.Tensor,
    page_table: torch.Tensor,
    mask_captured: torch.Tensor | None = None,
    *,
    page_size: int,
    masks: int = 0,
    mask_token: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Return one row of aux hidden states per token that the draft has not ingested yet.

    ``length`` [B] tokens are committed in the target. Of the sequence's last ``pending_count`` [B]
    tokens t, the draft ingests the aux hidden state h_t, ``pending_captured`` [B, DM1, C], and
    x_{t+1}, ``pending_tokens`` [B, DM1]; both are oldest first. ``page_table`` [B, P] is that of
    the draft. A sequence that is ``done`` [B] (including padding) has no rows. M = ``masks`` rows
    follow those of a sequence at the next positions, with ``mask_token`` and ``mask_captured`` [C]
    (P-EAGLE).

    There are T = B·(DM1 + M) rows; the first row_start[B] are live, by sequence. Returns token_ids
    [T], captured_rows [T, C], positions [T] (row t is at position t), row_start [B+1], row_slot
    [T], write_slot [T], tree_start [B] = length + M, ancestor_bits [T, 1] (zeros), logit_rows [B·(1
    + M)] and score [B, 1 + M] (zeros: the root's). logit_rows are each sequence's last pending row
    and its mask rows, or arbitrary rows if it has none. Rows that are not live have zeros and a
    write_slot in page 0.
    """
    import torch

    batch, capacity = pending_tokens.shape
    rows = batch * (capacity + masks)
    token_ids, positions, row_slot = torch.zeros(3, rows, dtype=torch.int32).unbind()
    write_slot = torch.arange(rows, dtype=torch.int32) % page_size
    captured_rows = pending_captured.new_zeros(rows, pending_captured.shape[2])
    row_start = torch.zeros(batch + 1, dtype=torch.int32)
    for b in range(batch):
        first, count = int(row_start[b]), 0 if done[b] else int(pending_count[b])
        total = 0 if done[b] else count + masks
        row_start[b + 1] = first + total
        for i in range(total):
            row, position = first + i, int(length[b]) - count + i
            if i < count:
                token_ids[row], captured_rows[row] = pending_tokens[b, i], pending_captured[b, i]
            else:
                assert mask_captured is not None
                token_ids[row], captured_rows[row] = mask_token, mask_captured
            positions[row] = row_slot[row] = position
            write_slot[row] = pool_slot(page_table[b], position, page_size, row=row, live=True)
    last = row_start[1:, None] - torch.arange(masks, -1, -1) - 1
    return (
        token_ids.clone(),
        captured_rows,
        positions.clone(),
        row_start,
        row_slot.clone(),
        write_slot,
        torch.where(done != 0, 0, length + masks).int(),
        torch.zeros(rows, 1, dtype=torch.int32),
        last.clamp(min=0).int().flatten(),
        torch.zeros(batch, 1 + masks),
    )


OP = OpSpec(
    name="ExtendInputs",
    doc="The state of a batch to the draft's rows for the tokens committed since it last ran.",
    inputs=(
        TensorSpec("length", "int32", ("B",)),
        TensorSpec("done", "int32", ("B",)),
        TensorSpec("pending_count", "int32", ("B",)),
        TensorSpec("pending_tokens", "int32", ("B", "DM1")),
        TensorSpec("pending_captured", "T", ("B", "DM1", "C")),
        TensorSpec("page_table", "int32", ("B", "P")),
        TensorSpec("mask_captured", "T", ("C",), optional=True),
    ),
    outputs=(
        TensorSpec("token_ids", "int32", ("T",)),
        TensorSpec("captured_rows", "T", ("T", "C")),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("write_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("ancestor_bits", "int32", ("T", "1")),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("score", "float32", ("B", "F")),
    ),
    attributes=(
        AttributeSpec("page_size", int),
        AttributeSpec("masks", int, 0),
        AttributeSpec("mask_token", int, 0),
    ),
    reference=reference,
    lower=lower,
    traffic=Weights(),
)
