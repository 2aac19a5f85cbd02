"""KvBlockSelect: select the best blocks for a verification tree's queries, as a page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_block_select.body import body
from specbuild.plugins_cuda.kv_block_select.lowering import lower
from specbuild.plugins_cuda.kv_block_summary.op import SUMMARY_AXES, SUMMARY_BODY_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch

TABLE_AXES = ("B", "kv_heads", "entries")


def block_scores(
    queries: torch.Tensor, summaries: torch.Tensor, *, reduction: str, score: str
) -> torch.Tensor:
    """Return the scores of blocks [m, kv_heads, 2, D] for ``queries`` [n, kv_heads, group, D].

    The root is the first query. The result, fp32 [kv_heads, m], is not divided by the number of
    queries (``mean``) and of heads of a group, which does not affect the order.
    """
    import torch

    queries, summaries = queries.float(), summaries.float()
    high, low = summaries[:, :, 0], summaries[:, :, 1]
    if score == "quest":
        scores = torch.einsum("nhgd,mhd->nhgm", queries.clamp(min=0), high)
        scores = scores + torch.einsum("nhgd,mhd->nhgm", queries.clamp(max=0), low)
    else:
        dots = [torch.einsum("nhgd,mhd->nhgm", queries, side) for side in (high, low)]
        scores = torch.maximum(*dots)
    over_queries = {
        "mean": lambda: scores.sum(0),
        "max": lambda: scores.amax(0),
        "last": lambda: scores[0],
    }[reduction]()
    return over_queries.sum(1)


def reference(
    q: torch.Tensor,
    summary_pool: torch.Tensor,
    logical_pages: torch.Tensor,
    row_start: torch.Tensor,
    row_slot: torch.Tensor,
    tree_start: torch.Tensor,
    tree_count: torch.Tensor,
    blocks: torch.Tensor,
    budget: torch.Tensor,
    partial_table: torch.Tensor,
    *,
    sink_pages: int,
    block_pages: int,
    reduction: str,
    score: str,
) -> torch.Tensor:
    """Return ``partial_table`` [B, kv_heads, V] with new entries for sequences with ``blocks`` >=
    0.

    The queries of sequence b are the rows of its tree, the root first: rows of ``q`` [T, Hq, D] at
    slots ``tree_start[b]`` … ``tree_start[b] + tree_count[b] − 1``. The summary of block i
    (KvBlockSummary) is the entry of page ``logical_pages[b, sink_pages + i·block_pages]``.

    The score of a query is the larger of its products with the maximum and with the minimum
    (``dot``), or the sum over channels of the larger product (``quest``). The ``reduction`` over
    queries is the mean, the maximum, or the root's score (``last``). The score of a KV head is the
    mean over the query heads of its group. Each KV head selects the ``min(budget[b], blocks[b])``
    best blocks; ties go to the lower one.

    The new entries are the pages of the sink, of the selected blocks in order of position, and
    those from the end of block ``blocks[b] − 1`` on, as many as fit; then zeros.
    """
    import torch

    _, kv_heads, entries = partial_table.shape
    out = partial_table.clone()
    for b in range(len(out)):
        count, first = int(blocks[b]), int(row_start[b])
        if count < 0:
            continue
        slots = row_slot[first : int(row_start[b + 1])] - tree_start[b]
        asks = q[first : first + len(slots)][(slots >= 0) & (slots < tree_count[b])]
        queries = asks.unflatten(1, (kv_heads, -1))
        starts = sink_pages + block_pages * torch.arange(count)
        summaries = summary_pool[logical_pages[b, starts].long()]
        scores = block_scores(queries, summaries, reduction=reduction, score=score)
        ranked = scores.sort(dim=1, descending=True, stable=True).indices
        chosen = ranked[:, : int(budget[b])].sort(dim=1).values
        places = sink_pages + block_pages * chosen.unsqueeze(2) + torch.arange(block_pages)
        for head in range(kv_heads):
            begin = sink_pages + block_pages * count
            tail = torch.arange(begin, max(begin, logical_pages.shape[1]))
            view = torch.cat([torch.arange(sink_pages), places[head].flatten(), tail])[:entries]
            # A short context has less than a full sink.
            view = view[view < logical_pages.shape[1]]
            out[b, head] = 0
            out[b, head, : len(view)] = logical_pages[b, view]
    return out


OP = OpSpec(
    name="KvBlockSelect",
    doc="The page table of a partial view: sink, the best blocks per KV head, window (SpecPV).",
    inputs=(
        TensorSpec("q", "T", ("T", "q_heads", "width")),
        TensorSpec("summary_pool", "T", SUMMARY_AXES, body_axes=SUMMARY_BODY_AXES),
        TensorSpec("logical_pages", "int32", ("B", "P")),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("tree_count", "int32", ("B",)),
        TensorSpec("blocks", "int32", ("B",)),
        TensorSpec("budget", "int32", ("B",)),
        TensorSpec("partial_table", "int32", TABLE_AXES, body_axes=TABLE_AXES),
    ),
    outputs=(TensorSpec("partial_table_out", "int32", TABLE_AXES, body_axes=TABLE_AXES),),
    attributes=(
        AttributeSpec("sink_pages", int),
        AttributeSpec("block_pages", int),
        AttributeSpec("reduction", str, "mean"),
        AttributeSpec("score", str, "dot"),
    ),
    aliases=(("partial_table_out", "partial_table"),),
    reference=reference,
    body=body,
    lower=lower,
    traffic=NoTraffic("reads two summaries a page, in full steps only"),
)
