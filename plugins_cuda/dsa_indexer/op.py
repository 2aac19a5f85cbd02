"""DsaIndexer: the cached tokens that each row attends to, by a learned score (DSA-lite)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.dsa_indexer.body import body, list_length
from specbuild.plugins_cuda.dsa_indexer.key_types import key_values
from specbuild.plugins_cuda.dsa_indexer.lowering import lower, refusal
from specbuild.plugins_cuda.dsa_indexer.reference import indexer_scores
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.op import visibility
from specbuild.plugins_cuda.traffic import TrafficRequest, cache_term, stored_terms
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.engine_dir.traffic import Traffic

if TYPE_CHECKING:
    import torch

INDEXER_POOL_AXES = ("pages", "1", "page_size", "d_idx")
INDEXER_POOL_BODY_AXES = ("1", "pages", "page_size", "d_idx")
ATTRIBUTES = (
    AttributeSpec("top_k", int),
    AttributeSpec("threshold", int),
    AttributeSpec("first_tokens", int),
    AttributeSpec("recent_tokens", int),
)


def reference(
    q: torch.Tensor,
    head_weights: torch.Tensor | None,
    key_pool: torch.Tensor,
    page_table: torch.Tensor,
    row_start: torch.Tensor,
    row_slot: torch.Tensor,
    tree_start: torch.Tensor,
    ancestor_bits: torch.Tensor,
    positions: torch.Tensor,
    budget: torch.Tensor,
    *,
    top_k: int,
    threshold: int,
    first_tokens: int,
    recent_tokens: int,
) -> torch.Tensor:
    """Return the view slots that each row attends to: int32 [T, N, S], rising, padded with −1.

    Row i of sequence b, at ``positions[i]``, is sparse if ``budget[b] >= 0`` and ``positions[i] >=
    threshold``. Otherwise its list starts with ``WHOLE``, and it attends to all visible slots. The
    visible slots are those of PagedTreeAttention without a window. Of these, the first
    ``first_tokens`` of the view, the last ``recent_tokens`` positions including the row's own, and
    its ancestors in the tree are mandatory. Of the others it selects the ``budget[b] <= top_k``
    with the best :func:`indexer_scores` of ``q`` [T, n_idx, d_idx] and the keys in ``key_pool``;
    ties go to the lower slot. ``page_table`` [B, N, P] has one view for all KV heads, or one for
    each. A pool of bytes (uint8, on CUDA) holds keys in fp8 (e4m3).

    S = ``min(P·page_size, first_tokens + recent_tokens + 32·W + top_k)``. Rows of no sequence have
    empty lists.
    """
    import torch

    batch, views, pages = page_table.shape
    keys = pages * key_pool.shape[2]
    held = list_length(keys, ancestor_bits.shape[1], top_k, first_tokens, recent_tokens)
    out = torch.full((len(q), views, held), -1, dtype=torch.int32, device=q.device)
    slot = torch.arange(keys, device=q.device)
    for b in range(batch):
        rows = slice(int(row_start[b]), int(row_start[b + 1]))
        start, places, bits = int(tree_start[b]), row_slot[rows].long(), ancestor_bits[rows]
        seen = visibility(places, start, bits, keys, 0)
        near = visibility(places, start, bits, keys, recent_tokens)
        kept = near | (seen & ((slot < first_tokens) | (slot >= start)))
        sparse = (positions[rows] >= threshold) & (int(budget[b]) >= 0)
        for view in range(views):
            cached = key_values(key_pool)[page_table[b, view].long(), 0].flatten(0, 1)
            # Invisible slots may hold anything, including NaN.
            cached = cached.where(seen.any(0)[:, None], 0.0)
            weights = None if head_weights is None else head_weights[rows]
            scores = indexer_scores(q[rows], cached, weights)
            scores = scores.masked_fill(kept, torch.inf).masked_fill(~seen, -torch.inf)
            ranked = scores.sort(dim=1, descending=True, stable=True).indices
            for i, order in enumerate(ranked):
                mine = out[rows.start + i, view]
                if not sparse[i]:
                    mine[0] = WHOLE
                    continue
                count = min(int(seen[i].sum()), int(kept[i].sum()) + int(budget[b]))
                mine[:count] = order[:count].sort().values
    return out


def traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: a key per visible token, which the rows of a sequence share."""
    pool, attributes = request.tensors["key_pool"], request.attributes
    listed = ("top_k", "first_tokens", "recent_tokens")
    scoring = 2 * prod(request.tensors["q"].shape[1:])
    return Traffic(
        read=(
            *stored_terms(request),
            cache_term(pool.shape[3] * ITEM_BYTES[pool.dtype], "seen_token", 0),
        ),
        operations=(cache_term(scoring, "row_token_pair", 0),),
        chosen_tokens=sum(int(attributes[name]) for name in listed),
    )


OP = OpSpec(
    name="DsaIndexer",
    doc="The slots that each row attends to: first, recent, ancestors, and the best by a score.",
    inputs=(
        TensorSpec("q", "T", ("T", "n_idx", "d_idx")),
        TensorSpec("head_weights", "T", ("T", "n_idx"), optional=True),
        TensorSpec("key_pool", "C", INDEXER_POOL_AXES, body_axes=INDEXER_POOL_BODY_AXES),
        TensorSpec("page_table", "int32", ("B", "N", "P")),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("ancestor_bits", "int32", ("T", "W")),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("budget", "int32", ("B",)),
    ),
    outputs=(TensorSpec("selected", "int32", ("T", "N", "S")),),
    attributes=ATTRIBUTES,
    reference=reference,
    body=body,
    lower=lower,
    refusal=refusal,
    traffic=traffic,
)
