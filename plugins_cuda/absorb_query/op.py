"""AbsorbQuery: absorb the keys' up-projection into queries, and apply RoPE (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.absorb_query.lowering import lower
from specbuild.plugins_cuda.absorb_query.packing import unpack_absorbed
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_qkv_rope.op import rotate
from specbuild.plugins_cuda.traffic import TrafficRequest, stored_terms, terms
from specbuild.runtime.engine_dir.traffic import Term, Traffic

if TYPE_CHECKING:
    import torch


def reference(
    q: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_heads: int,
    entry: int,
) -> torch.Tensor:
    """Return queries in the space of cache entries, [T, q_heads, entry].

    ``q`` [T, q_heads · (N + R)] has, for each head, a part without and a part with RoPE. The first
    is multiplied by the head's W_uk [N, L] (``weight``, packed by ``pack_absorbed``). The second is
    rotated with ``cos``, ``sin`` fp32 [positions, R/2]. Wider entries are padded with zeros.
    """
    import torch

    rope = 2 * cos.shape[1]
    heads = q.view(len(q), q_heads, -1)
    nope, turning = heads.split([heads.shape[2] - rope, rope], dim=2)
    w_uk = unpack_absorbed(weight, q_heads).float()
    out = q.new_zeros(len(q), q_heads, entry)
    rank = w_uk.shape[2]
    out[..., :rank] = torch.einsum("thn,hnr->thr", nope.float(), w_uk).to(q.dtype)
    out[..., rank : rank + rope] = rotate(turning, cos, sin, positions)
    return out


def traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: the weight once; every head of a row multiplies its part of it."""
    tiles, _, _ = request.tensors["weight"].shape
    heads = int(request.attributes["q_heads"])
    rope = 2 * request.tensors["cos"].shape[1]
    nope = request.tensors["q"].shape[1] // heads - rope
    return Traffic(
        read=stored_terms(request, looked_up=("cos", "sin")),
        operations=terms(Term("dense", 2 * tiles * TILE_ROWS * nope, "row")),
    )


OP = OpSpec(
    name="AbsorbQuery",
    doc="Queries in the space of latents: W_uk by head, and rotation of the part that turns.",
    inputs=(
        TensorSpec("q", "T", ("T", "Nq")),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("cos", "float32", ("P", "half")),
        TensorSpec("sin", "float32", ("P", "half")),
        TensorSpec("positions", "int32", ("T",)),
    ),
    outputs=(TensorSpec("absorbed", "T", ("T", "heads", "width")),),
    attributes=(AttributeSpec("q_heads", int), AttributeSpec("entry", int)),
    reference=reference,
    lower=lower,
    traffic=traffic,
)
