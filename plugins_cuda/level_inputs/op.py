"""LevelInputs: the frontier of a level becomes the draft's next rows; candidates join the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.extend_inputs.op import pool_slot
from specbuild.plugins_cuda.level_inputs.lowering import lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY

if TYPE_CHECKING:
    import torch


def live_sequences(done: torch.Tensor) -> int:
    """Return one past the last sequence that is not done: later ones have no rows."""
    live = [b for b, flag in enumerate(done.tolist()) if not flag]
    return live[-1] + 1 if live else 0


def reference(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    frontier: torch.Tensor,
    hidden: torch.Tensor,
    parent_rows: torch.Tensor | None,
    parent_bits: torch.Tensor | None,
    length: torch.Tensor,
    done: torch.Tensor,
    limit: torch.Tensor,
    page_table: torch.Tensor,
    pool_tokens: torch.Tensor,
    pool_scores: torch.Tensor,
    pool_parents: torch.Tensor,
    frontier_pool: torch.Tensor,
    *,
    level: int,
    depth: int,
    page_size: int,
    last: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Compute the draft's inputs between the TreeExpand of ``level`` (1 … D) and its next run.

    ``tokens``, ``scores`` [B, FK] and ``frontier`` [B, K] are the outputs of that TreeExpand (FK is
    K at level 1 and K² after), ``depth`` is D. The candidates are appended to the pool ``pool_…``
    [B, M], M ≥ K + (D − 1)·K². At level 1 they are entries 0 … K − 1 with parent −1. Later they are
    K² entries from K + (level − 2)·K² on, those of node f with parent ``frontier_pool[b, f]`` [B,
    K]. Then frontier_pool receives the pool entries of the new frontier. Before level 1
    frontier_pool and the pool have no defined content.

    Node j of sequence b is row b·K + j (T = B·K), at tree slot (level − 1)·K + j. Its view slot is
    that plus length, its position is length + level − 1, limited to the last position below
    ``limit``. ``hidden`` [T0, H] are the output features of the draft's last run. The parent's row
    is ``parent_rows[b]`` [B] at level 1 (ExtendInputs' logit_rows), and b·K + frontier // K later.
    ``parent_bits`` [B·K, W] are the last run's ancestor_bits, absent at level 1.

    Returns token_ids [T], hidden_rows [T, H], positions [T], row_start [B+1], row_slot [T],
    write_slot [T], tree_start [B], ancestor_bits [T, W] with W = max(1, ceil(K·(D − 1) / 32)),
    logit_rows [T] = 0, 1, …, score [B, K] of the frontier, and in place pool_tokens, pool_scores,
    pool_parents, frontier_pool. row_start is 0, K, 2K, … up to the last sequence that is not
    ``done``. Rows of a ``done`` sequence have token 0, position 0, features 0, their own bit,
    tree_start 0 and a write_slot in page 0. With ``last`` = 1 (level D) only the pool is written;
    the other outputs are unspecified and may be absent.
    """
    import torch

    del last  # the outputs that it leaves unspecified are computed here too
    batch, k = frontier.shape
    rows = batch * k
    offset = 0 if level == 1 else k + (level - 2) * k * k
    places = slice(offset, offset + tokens.shape[1])
    picks = frontier.long()
    pool_tokens, pool_scores = pool_tokens.clone(), pool_scores.clone()
    pool_parents = pool_parents.clone()
    pool_tokens[:, places], pool_scores[:, places] = tokens, scores
    pool_parents[:, places] = -1 if level == 1 else frontier_pool.repeat_interleave(k, dim=1)

    token_ids = tokens.gather(1, picks).flatten()
    positions, row_slot, write_slot = torch.zeros(3, rows, dtype=torch.int32).unbind()
    hidden_rows = hidden.new_zeros(rows, hidden.shape[1])
    words = max(1, -(-k * (depth - 1) // 32))
    bits = torch.zeros(rows, words, dtype=torch.int64)
    for row in range(rows):
        b, j = divmod(row, k)
        live, own = not done[b], (level - 1) * k + j
        slot = own + (int(length[b]) if live else 0)
        row_slot[row] = slot
        write_slot[row] = pool_slot(page_table[b], slot, page_size, row=row, live=live)
        if live:
            positions[row] = min(int(length[b]) + level - 1, int(limit[b]) - 1)
            node = b * k + int(frontier[b, j]) // k
            hidden_rows[row] = hidden[node if parent_rows is None else int(parent_rows[b])]
            if parent_bits is not None:
                bits[row] = parent_bits[node]
        else:
            token_ids[row] = 0
        if own // 32 < words:
            bits[row, own // 32] |= 1 << own % 32
    signed = torch.where(bits >= 2**31, bits - 2**32, bits)
    return (
        token_ids,
        hidden_rows,
        positions.clone(),
        (torch.arange(batch + 1) * k).clamp(max=k * live_sequences(done)).int(),
        row_slot.clone(),
        write_slot.clone(),
        torch.where(done != 0, 0, length).int(),
        signed.int(),
        torch.arange(rows, dtype=torch.int32),
        scores.gather(1, picks),
        pool_tokens,
        pool_scores,
        pool_parents,
        frontier + offset,
    )


OP = OpSpec(
    name="LevelInputs",
    doc="A draft level's candidates to the pool, and its frontier to the draft's next rows.",
    inputs=(
        TensorSpec("tokens", "int32", ("B", "FK")),
        TensorSpec("scores", "float32", ("B", "FK")),
        TensorSpec("frontier", "int32", ("B", "K")),
        TensorSpec("hidden", "T", ("T0", "H")),
        TensorSpec("parent_rows", "int32", ("B",), optional=True),
        TensorSpec("parent_bits", "int32", ("BK", "W"), optional=True),
        TensorSpec("length", "int32", ("B",)),
        TensorSpec("done", "int32", ("B",)),
        TensorSpec("limit", "int32", ("B",)),
        TensorSpec("page_table", "int32", ("B", "P")),
        TensorSpec("pool_tokens", "int32", ("B", "M")),
        TensorSpec("pool_scores", "float32", ("B", "M")),
        TensorSpec("pool_parents", "int32", ("B", "M")),
        TensorSpec("frontier_pool", "int32", ("B", "K")),
    ),
    outputs=(
        TensorSpec("token_ids", "int32", ("T",), optional=True),
        TensorSpec("hidden_rows", "T", ("T", "H"), optional=True),
        TensorSpec("positions", "int32", ("T",), optional=True),
        TensorSpec("row_start", "int32", ("B1",), optional=True),
        TensorSpec("row_slot", "int32", ("T",), optional=True),
        TensorSpec("write_slot", "int32", ("T",), optional=True),
        TensorSpec("tree_start", "int32", ("B",), optional=True),
        TensorSpec("ancestor_bits", "int32", ("T", "words"), optional=True),
        TensorSpec("logit_rows", "int32", ("T",), optional=True),
        TensorSpec("score", "float32", ("B", "K"), optional=True),
        TensorSpec("pool_tokens_out", "int32", ("B", "M")),
        TensorSpec("pool_scores_out", "float32", ("B", "M")),
        TensorSpec("pool_parents_out", "int32", ("B", "M")),
        TensorSpec("frontier_pool_out", "int32", ("B", "K")),
    ),
    attributes=(
        AttributeSpec("level", int),
        AttributeSpec("depth", int),
        AttributeSpec("page_size", int),
        AttributeSpec("last", int, 0),
    ),
    aliases=(
        ("pool_tokens_out", "pool_tokens"),
        ("pool_scores_out", "pool_scores"),
        ("pool_parents_out", "pool_parents"),
        ("frontier_pool_out", "frontier_pool"),
    ),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
