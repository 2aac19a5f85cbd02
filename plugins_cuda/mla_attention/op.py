"""MlaAttention: attention to a latent cache, with rebuilt or absorbed keys and absorbed values."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.mla_attention.body import body
from specbuild.plugins_cuda.mla_attention.lowering import lower, refusal, tactics
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.paged_tree_attention.op import among, unpack_bits, visibility
from specbuild.plugins_cuda.traffic import TrafficRequest, cache_term, stored_terms, terms
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.engine_dir.traffic import Term, Traffic

if TYPE_CHECKING:
    import torch

LATENT_POOL_AXES = ("pages", "1", "page_size", "latent")
LATENT_POOL_BODY_AXES = ("1", "pages", "page_size", "latent")


def key_positions(
    tree_start: int, ancestor_bits: torch.Tensor, page_position: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return the position of each view slot of one sequence: int64 [P·page_size].

    The first slot of a page is at ``page_position`` [P], the others follow. The distance of a tree
    slot from slot ``tree_start`` is the number of its ancestors, which are equal in every row that
    attends to it. Positions of invisible slots are arbitrary.
    """
    import torch

    keys = len(page_position) * page_size
    offset = torch.arange(page_size, device=page_position.device)
    committed = (page_position.long().unsqueeze(1) + offset).flatten()
    bits = unpack_bits(ancestor_bits, max(keys - tree_start, 0)).long()
    before = bits.cumsum(1) - bits
    depth = torch.cat([before * bits, bits.new_zeros(1, bits.shape[1])]).amax(0)
    return torch.cat([committed[:tree_start], committed[tree_start : tree_start + 1] + depth])


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rotate ``x`` [S, heads, D] by half-split RoPE at ``positions`` [S], fp32.

    Positions past the tables (slots behind the last used page) use the last row.
    """
    import torch

    at = positions.clamp(max=len(cos) - 1)
    c, s = cos[at].float().unsqueeze(1), sin[at].float().unsqueeze(1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * c - high * s, high * c + low * s], dim=-1)


def reference(
    q: torch.Tensor,
    c_pool: torch.Tensor,
    w_k: torch.Tensor | None,
    b_k: torch.Tensor | None,
    w_v: torch.Tensor,
    b_v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    page_table: torch.Tensor,
    row_start: torch.Tensor,
    row_slot: torch.Tensor,
    tree_start: torch.Tensor,
    ancestor_bits: torch.Tensor,
    sinks: torch.Tensor | None,
    selected: torch.Tensor | None,
    page_position: torch.Tensor | None,
    *,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Return attention of ``q`` [T, Hq, D] to the latents c_s of each sequence, [T, Hq, Dv], fp32.

    With ``w_k`` [L, Hkv, D] the key of head h is rebuilt: ``k_s = RoPE(c_s w_k,h + b_k,h)`` at the
    slot's position. ``page_position`` [B, P] is the first position of each page; without it, slots
    equal positions. Without ``w_k`` the query is absorbed (D = L), and the latent is the key of
    every head. Values are absorbed: ``o_h = (Σ w_s c_s[:Lv]) w_v,h + b_v,h · Σ w_s``, ``w_v`` [Lv,
    Hv, Dv]; with a sink Σ w_s < 1. Rows, views, windows, sinks and ``selected`` are those of
    PagedTreeAttention. The slots of a launch's rows are the last visible ones of each row.
    """
    import torch

    rows, q_heads, _ = q.shape
    page_size, v_latent, v_heads, v_width = c_pool.shape[2], *w_v.shape
    kv_heads = 1 if w_k is None else w_k.shape[1]
    out = [q.new_zeros(0, q_heads, v_width)]
    for sequence in range(page_table.shape[0]):
        first, last = int(row_start[sequence]), int(row_start[sequence + 1])
        count, keys = last - first, page_table.shape[2] * page_size
        start, bits = int(tree_start[sequence]), ancestor_bits[first:last]
        mask = visibility(row_slot[first:last].long(), start, bits, keys, window)
        if selected is not None:
            mask &= among(selected[first:last], keys)[:, 0]
        latent = c_pool[page_table[sequence, 0].long(), 0].flatten(0, 1).float()
        # Invisible slots may hold anything, including NaN: 0 · NaN must not enter the sum.
        latent = latent.where(mask.any(0)[:, None], 0.0)
        k = latent.unsqueeze(1)
        if w_k is not None:
            assert cos is not None and sin is not None
            k = torch.einsum("sl,lhd->shd", latent, w_k.float())
            k = k if b_k is None else k + b_k.float()
            begins = torch.arange(0, keys, page_size, device=q.device)
            begins = begins if page_position is None else page_position[sequence]
            k = rotated(k, cos, sin, key_positions(start, bits, begins, page_size))
        group = q_heads // kv_heads
        queries = q[first:last].float().reshape(count, kv_heads, group, q.shape[2])
        logits = torch.einsum("thgd,shd->thgs", queries, k) * scale
        logits = logits.masked_fill(~mask[:, None, None, :], -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, group, 1).expand(count, -1, -1, 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(dim=-1)[..., :keys].flatten(1, 2)
        mixed = (weights @ latent[:, :v_latent]).unflatten(1, (v_heads, -1))
        attended = torch.einsum("thgl,lhd->thgd", mixed, w_v.float())
        if b_v is not None:
            mass = weights.sum(-1, keepdim=True).unflatten(1, (v_heads, -1))
            attended = attended + mass * b_v.float().unsqueeze(1)
        out.append(attended.flatten(1, 2).to(q.dtype))
    joined = torch.cat(out)
    padding = q.new_zeros(rows - len(joined), *joined.shape[1:])
    return torch.cat([joined, padding])


def traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: visible latents, shared by the rows of a sequence; lists of each row.

    Keys are rebuilt once for the rows of a sequence, or for each row's list.
    """
    pool, (q_heads, width) = request.tensors["c_pool"], request.tensors["q"].shape[1:]
    value, _, v_width = request.tensors["w_v"].shape
    entry = pool.shape[3] * ITEM_BYTES[pool.dtype]
    # The products of a row with a latent: its score, and its part of the weighted sum.
    attending = 2 * q_heads * (width + value)
    w_k = request.tensors.get("w_k")
    rebuilding = 2 * prod(w_k.shape) if w_k is not None else 0
    weights = stored_terms(request, looked_up=("cos", "sin"))
    values = Term("dense", 2 * q_heads * value * v_width, "row")
    if "selected" in request.tensors:
        return Traffic(
            read=(*weights, Term("kv_full", entry, "chosen_token")),
            operations=(values, Term("kv_full", attending + rebuilding, "chosen_token")),
        )
    window = int(request.attributes["window"])
    return Traffic(
        read=(*weights, cache_term(entry, "seen_token", window)),
        operations=terms(
            values,
            cache_term(attending, "row_token_pair", window),
            cache_term(rebuilding, "seen_token", window),
        ),
    )


OP = OpSpec(
    name="MlaAttention",
    doc="Attends over cached latents: keys rebuilt or queries absorbed, values absorbed.",
    inputs=(
        TensorSpec("q", "T", ("T", "q_heads", "width")),
        TensorSpec("c_pool", "T", LATENT_POOL_AXES, body_axes=LATENT_POOL_BODY_AXES),
        TensorSpec("w_k", "T", ("latent", "kv_heads", "width"), optional=True),
        TensorSpec("b_k", "T", ("kv_heads", "width"), optional=True),
        TensorSpec("w_v", "T", ("v_latent", "v_heads", "v_width")),
        TensorSpec("b_v", "T", ("v_heads", "v_width"), optional=True),
        TensorSpec("cos", "float32", ("positions", "half_width"), optional=True),
        TensorSpec("sin", "float32", ("positions", "half_width"), optional=True),
        TensorSpec("page_table", "int32", ("B", "1", "P")),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("ancestor_bits", "int32", ("T", "W")),
        TensorSpec("sinks", "float32", ("q_heads",), optional=True),
        TensorSpec("selected", "int32", ("T", "1", "S"), optional=True),
        TensorSpec("page_position", "int32", ("B", "P"), optional=True),
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
