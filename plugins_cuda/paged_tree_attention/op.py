"""PagedTreeAttention: one visibility rule for prefill, decode, verification and drafting."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_write.codes import as_values
from specbuild.plugins_cuda.kv_write.op import POOL_AXES, POOL_BODY_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE, body
from specbuild.plugins_cuda.paged_tree_attention.lowering import lower, tactics
from specbuild.plugins_cuda.paged_tree_attention.selected import refusal
from specbuild.plugins_cuda.traffic import TrafficRequest, cache_term, stored_terms
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.engine_dir.traffic import Term, Traffic

if TYPE_CHECKING:
    import torch


def unpack_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack int32 words [..., W] to bools [..., count]; bit j is bit ``j % 32`` of word j // 32.

    ``count`` may exceed 32·W; further bits are False.
    """
    import torch

    shifts = torch.arange(32, device=words.device)
    bits = (words.long().unsqueeze(-1) >> shifts) & 1
    bits = bits.flatten(-2).bool()[..., :count]
    return torch.nn.functional.pad(bits, (0, count - bits.shape[-1]))


def visibility(
    row_slot: torch.Tensor, tree_start: int, ancestor_bits: torch.Tensor, keys: int, window: int
) -> torch.Tensor:
    """Return which of the view slots 0..keys-1 are visible to each row of a sequence: [rows, keys].

    Below ``tree_start`` a slot is visible if ``slot <= row_slot``. From there on it is visible if
    the row has its ancestor bit. A window limits positions. The position of a committed slot is the
    slot. That of a tree slot is ``tree_start`` plus the number of ancestors of the row, so siblings
    share a position.
    """
    import torch

    slot = torch.arange(keys, device=row_slot.device)
    tree_bits = unpack_bits(ancestor_bits, max(keys - tree_start, 0))
    chain = slot[:tree_start].unsqueeze(0) <= row_slot.unsqueeze(1)
    visible = torch.cat([chain, tree_bits], dim=1)[:, :keys]
    if window > 0:
        before = tree_bits.long().cumsum(1) - tree_bits.long()
        key_position = torch.cat(
            [slot[:tree_start].expand(len(row_slot), -1), tree_start + before], dim=1
        )[:, :keys]
        in_tree = row_slot >= tree_start
        own = (row_slot - tree_start).clamp(min=0).long().unsqueeze(1)
        # A row below tree_start has no bits, so `before` has no entry for it.
        own_depth = before.gather(1, own) if before.shape[1] else torch.zeros_like(own)
        position = torch.where(in_tree, tree_start + own_depth.squeeze(1), row_slot)
        visible &= position.unsqueeze(1) - key_position < window
    return visible


def among(selected: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the mask [rows, N, keys] of the view slots in ``selected`` [rows, N, S].

    Lists are padded with -1; a list that starts with :data:`WHOLE` has every slot.
    """
    import torch

    picks = selected.long()
    chosen = torch.zeros(*picks.shape[:2], keys + 1, dtype=torch.bool, device=picks.device)
    chosen = chosen.scatter(2, picks.where(picks >= 0, keys), True)[..., :keys]
    return chosen | (picks[..., :1] == WHOLE)


def reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    row_start: torch.Tensor,
    row_slot: torch.Tensor,
    tree_start: torch.Tensor,
    ancestor_bits: torch.Tensor,
    sinks: torch.Tensor | None,
    selected: torch.Tensor | None,
    *,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Return attention of ``q`` [T, Hq, D] to each sequence's pages: [T, Hq, Dv], fp32 inside.

    Row i of sequence b (``row_start[b] <= i < row_start[b+1]``) attends to the slots of
    :func:`visibility`. ``page_table`` [B, G, P] has one view (G = 1) or one per KV head. The sink
    of head h is a logit without a value in every row's softmax (GPT-OSS). ``selected`` [T, N, S]
    restricts a row to those view slots, rising and padded with -1, with one list for all KV heads
    (N = 1) or one for each. A list that starts with :data:`WHOLE` restricts nothing. Rows of no
    sequence are zero. The first row of a sequence has the lowest slot: kernels read lower slots
    before the previous launch has written the keys and values of this launch's rows.
    """
    import torch

    rows, q_heads, _ = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    out = [q.new_zeros(0, q_heads, v_pool.shape[3])]
    for sequence in range(page_table.shape[0]):
        first, last = int(row_start[sequence]), int(row_start[sequence + 1])
        keys = page_table.shape[2] * page_size
        mask = visibility(
            row_slot[first:last].long(),
            int(tree_start[sequence]),
            ancestor_bits[first:last],
            keys,
            window,
        ).unsqueeze(1)
        if selected is not None:
            mask = mask & among(selected[first:last], keys)
        # "h" KV heads, "p" pages, "o" offset in the page, "d" width
        table = page_table[sequence].long().expand(kv_heads, -1)
        heads = torch.arange(kv_heads, device=q.device).unsqueeze(1)
        k = as_values(k_pool[table, heads]).flatten(1, 2).float()
        v = as_values(v_pool[table, heads]).flatten(1, 2).float()
        # Invisible slots may hold anything, including NaN: 0 · NaN must not enter the sum.
        seen = mask.any(0).unsqueeze(2)
        k, v = k.where(seen, 0.0), v.where(seen, 0.0)
        group = q_heads // kv_heads
        queries = q[first:last].float().reshape(last - first, kv_heads, group, q.shape[2])
        logits = torch.einsum("thgd,hsd->thgs", queries, k) * scale
        logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, group, 1).expand(last - first, -1, -1, 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(dim=-1)[..., :keys]
        attended = torch.einsum("thgs,hsd->thgd", weights, v)
        out.append(attended.flatten(1, 2).to(q.dtype))
    joined = torch.cat(out)
    padding = q.new_zeros(rows - len(joined), *joined.shape[1:])
    return torch.cat([joined, padding])


def traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: visible keys and values, shared by a sequence's rows; lists per row."""
    entry = 0
    for name in ("k_pool", "v_pool"):
        pool = request.tensors[name]
        entry += pool.shape[1] * pool.shape[3] * ITEM_BYTES[pool.dtype]
    # Scores and the weighted sum: two products of a head's width each.
    operations = 4 * prod(request.tensors["q"].shape[1:])
    weights, window = stored_terms(request), int(request.attributes["window"])
    if "selected" in request.tensors:
        return Traffic(
            read=(*weights, Term("kv_full", entry, "chosen_token")),
            operations=(Term("kv_full", operations, "chosen_token"),),
        )
    return Traffic(
        read=(*weights, cache_term(entry, "seen_token", window)),
        operations=(cache_term(operations, "row_token_pair", window),),
    )


OP = OpSpec(
    name="PagedTreeAttention",
    doc="Attends over a sequence's pages: committed tokens, the causal chain, and tree ancestors.",
    inputs=(
        TensorSpec("q", "T", ("T", "q_heads", "width")),
        TensorSpec("k_pool", "C", POOL_AXES, body_axes=POOL_BODY_AXES),
        TensorSpec(
            "v_pool",
            "C",
            ("pages", "kv_heads", "page_size", "v_width"),
            body_axes=("kv_heads", "pages", "page_size", "v_width"),
        ),
        TensorSpec("page_table", "int32", ("B", "G", "P")),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("ancestor_bits", "int32", ("T", "W")),
        TensorSpec("sinks", "float32", ("q_heads",), optional=True),
        TensorSpec("selected", "int32", ("T", "N", "S"), optional=True),
    ),
    outputs=(TensorSpec("attended", "T", ("T", "q_heads", "v_width")),),
    attributes=(AttributeSpec("scale", float), AttributeSpec("window", int, 0)),
    reference=reference,
    body=body,
    lower=lower,
    refusal=refusal,
    tactics=tactics,
    traffic=traffic,
)
