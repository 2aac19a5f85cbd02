"""ViewInputs: a batch's tree rows, preceded by the tokens that full steps re-verify (SpecPV)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.level_inputs.op import live_sequences
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.view_inputs.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    ancestor_bits: torch.Tensor,
    write_slot_full: torch.Tensor,
    write_slot_sliding: torch.Tensor | None,
    tree_count: torch.Tensor,
    done: torch.Tensor,
    full_step: torch.Tensor,
    verified_len: torch.Tensor,
    view_blocks: torch.Tensor,
    budget: torch.Tensor,
    buffered_tokens: torch.Tensor,
    page_table_full: torch.Tensor,
    page_table_sliding: torch.Tensor | None,
    *,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_blocks: int,
    threshold: int,
    room: int,
) -> tuple[torch.Tensor, ...]:
    """Convert VerifyInputs' rows [R], R = B·N1, to T = R + ``room`` rows, the last ones padding.

    A sequence that is not ``done`` has L = ``positions[b·N1]`` committed tokens; the first
    ``verified_len`` are exact. With ``full_step`` it re-verifies positions verified_len … L − 1, as
    a chain before its tree. The token at position x is ``buffered_tokens[b, x mod F]``. This
    requires that the chains of all sequences up to it fit in ``room``, and sets ``fed_again`` [B].
    Another sequence is ``viewed`` [B] if it has a view (``view_blocks`` ≥ 0).

    ``blocks`` [B] is the number of complete blocks between sink and window, if a full step above
    ``threshold`` tokens summarizes them and selects from them, or else −1. ``view_slot`` [T] and
    ``view_start`` [B] are slots of the view: ``row_slot`` and ``tree_start`` minus the slots of the
    blocks outside of the view, view_blocks − min(budget, view_blocks).

    The rows of b start at ``row_start[b]``. Sequences past the last live one have none, and their
    tree rows follow all others. ``logit_rows`` [R] are the tree rows. Padding has token, position
    and slots 0, no bits, and is written to page 0.
    """
    import torch

    batch, (rows, words) = len(done), ancestor_bits.shape
    nodes, live, total = rows // batch, live_sequences(done), rows + room
    out_ids, out_positions, row_slot, view_slot, write_full, write_sliding = (
        torch.zeros(total, dtype=torch.int32) for _ in range(6)
    )
    padding = torch.arange(total, dtype=torch.int32) % page_size
    write_full[:], write_sliding[:] = padding, padding
    bits = torch.zeros(total, words, dtype=torch.int32)
    row_start = torch.zeros(batch + 1, dtype=torch.int32)
    logit_rows = torch.zeros(rows, dtype=torch.int32)
    tree_start, view_start, fed_again, viewed = torch.zeros(4, batch, dtype=torch.int32).unbind()
    tree_start, view_start = tree_start.clone(), view_start.clone()
    fed_again, viewed = fed_again.clone(), viewed.clone()
    blocks = torch.full((batch,), -1, dtype=torch.int32)
    row, left = 0, room

    def slot_of(table: torch.Tensor, position: int) -> int:
        return int(table[position // page_size]) * page_size + position % page_size

    for b in range(batch):
        length, exact = int(positions[b * nodes]), int(verified_len[b])
        chain = length - exact
        full = done[b] == 0 and full_step[b] != 0 and 0 <= chain <= left
        chain = chain if full else 0
        left -= chain
        fed_again[b] = int(full)
        viewed[b] = int(done[b] == 0 and not full and view_blocks[b] >= 0)
        hidden = 0
        if viewed[b]:
            hidden = int(view_blocks[b] - min(budget[b], view_blocks[b])) * block_size
        if full and length > threshold:
            blocks[b] = max(0, (length - sink_tokens) // block_size - window_blocks)
        tree_start[b], view_start[b] = length, length - hidden
        for x in range(exact, exact + chain):
            out_ids[row] = buffered_tokens[b, x % buffered_tokens.shape[1]]
            out_positions[row] = row_slot[row] = view_slot[row] = x
            write_full[row] = slot_of(page_table_full[b], x)
            if page_table_sliding is not None:
                write_sliding[row] = slot_of(page_table_sliding[b], x)
            row += 1
        for i in range(nodes):
            source = b * nodes + i
            logit_rows[source] = row
            out_ids[row], out_positions[row] = token_ids[source], positions[source]
            row_slot[row], view_slot[row] = length + i, length - hidden + i
            bits[row] = ancestor_bits[source]
            unused = done[b] != 0 or i >= tree_count[b]
            write_full[row] = row % page_size if unused else write_slot_full[source]
            if write_slot_sliding is not None:
                write_sliding[row] = row % page_size if unused else write_slot_sliding[source]
            row += 1
        row_start[b + 1] = row if b < live else row_start[b]
    return (
        out_ids,
        out_positions,
        row_start,
        row_slot,
        view_slot,
        tree_start,
        view_start,
        bits,
        write_full,
        write_sliding,
        logit_rows,
        fed_again,
        viewed,
        blocks,
    )


OP = OpSpec(
    name="ViewInputs",
    doc="A batch's tree rows, with what full steps re-verify in front of them (SpecPV).",
    inputs=(
        TensorSpec("token_ids", "int32", ("R",)),
        TensorSpec("positions", "int32", ("R",)),
        TensorSpec("ancestor_bits", "int32", ("R", "words")),
        TensorSpec("write_slot_full", "int32", ("R",)),
        TensorSpec("write_slot_sliding", "int32", ("R",), optional=True),
        TensorSpec("tree_count", "int32", ("B",)),
        TensorSpec("done", "int32", ("B",)),
        TensorSpec("full_step", "int32", ("B",)),
        TensorSpec("verified_len", "int32", ("B",)),
        TensorSpec("view_blocks", "int32", ("B",)),
        TensorSpec("budget", "int32", ("B",)),
        TensorSpec("buffered_tokens", "int32", ("B", "F")),
        TensorSpec("page_table_full", "int32", ("B", "P_full")),
        TensorSpec("page_table_sliding", "int32", ("B", "P_sliding"), optional=True),
    ),
    outputs=(
        TensorSpec("row_token_ids", "int32", ("T",)),
        TensorSpec("row_positions", "int32", ("T",)),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("view_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("view_start", "int32", ("B",)),
        TensorSpec("row_bits", "int32", ("T", "words")),
        TensorSpec("row_write_full", "int32", ("T",)),
        TensorSpec("row_write_sliding", "int32", ("T",), optional=True),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("fed_again", "int32", ("B",)),
        TensorSpec("viewed", "int32", ("B",)),
        TensorSpec("blocks", "int32", ("B",)),
    ),
    attributes=(
        AttributeSpec("page_size", int),
        AttributeSpec("block_size", int),
        AttributeSpec("sink_tokens", int),
        AttributeSpec("window_blocks", int),
        AttributeSpec("threshold", int),
        AttributeSpec("room", int),
    ),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
