"""RmsQkvRope: norm, Q, K and V projections, rotation, and writes of K and V to page slots.

Queries and keys may have norms before the rotation: of each head, or of all heads together. Without
queries, the op writes keys and values of rows whose result is unused. Without keys and values, it
computes the queries of a layer that reads the cache of another layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_write.op import POOL_AXES
from specbuild.plugins_cuda.kv_write.op import reference as kv_write
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.rms_qkv_rope.lowering import lower, tactics
from specbuild.plugins_cuda.rms_qkv_rope.packing import unpack_qkv, unpack_qkv_bias
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def rotate(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return ``heads`` [T, h, D] rotated half-split at ``positions`` [T], in fp32, cast back."""
    import torch

    first, second = heads.float().chunk(2, dim=-1)
    c, s = (table[positions.long()].unsqueeze(1) for table in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(heads.dtype)


def reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    write_slot: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    q_heads: int,
    kv_heads: int,
    eps: float,
    rounding: str,
    head_rounding: str = "llama",
    value_norm: int = 0,
    growth: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rotated q [T, q_heads, D] and the written pools.

    ``x`` [T, K] is normed with ``rounding`` if ``norm`` is not None. ``weight`` and ``bias`` [N]
    are packed by ``pack_qkv`` and ``join_qkv``, N = (q_heads + 2·kv_heads)·D. ``q_norm`` and
    ``k_norm`` [D] use ``head_rounding`` and the same ``eps``; for one norm over all heads they are
    [q_heads·D] and [kv_heads·D]. ``cos``, ``sin`` fp32 [positions, D/2]. The projections are
    rounded before these norms and the rotation, and after it. With ``growth``, ``cos`` has that
    many positions, followed by a factor per position that multiplies the rounded queries.

    With ``value_norm`` each head of values is divided by its root mean square. If ``q_heads`` is 0,
    there are no queries and no ``q_norm``, and q is empty. If ``kv_heads`` is 0, the pools are
    unchanged and there is no ``k_norm``.
    """
    import torch

    head_dim = 2 * cos.shape[1]
    normed = x if norm is None else rms_norm(x, norm, eps, rounding)
    qkv = normed.float() @ unpack_qkv(decoded(weight, x.shape[1]), head_dim).float().T
    if bias is not None:
        qkv = qkv + unpack_qkv_bias(bias, head_dim).float()
    heads = qkv.to(x.dtype).view(x.shape[0], -1, head_dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q = _normed(q, q_norm, eps, head_rounding)
    if k_norm is not None:
        k = _normed(k, k_norm, eps, head_rounding)
    if value_norm:
        v = rms_norm(v, torch.ones_like(v[0, 0]), eps, "gpt_oss")
    factors, cos = (cos[growth:].flatten(), cos[:growth]) if growth else (None, cos)
    turned = rotate(q, cos, sin, positions)
    if factors is not None:
        turned = (turned.float() * factors[positions.long()][:, None, None]).to(x.dtype)
    if not kv_heads:
        return turned, k_pool.clone(), v_pool.clone()
    return (
        turned,
        kv_write(k_pool, rotate(k, cos, sin, positions), write_slot),
        kv_write(v_pool, v, write_slot),
    )


def _normed(heads: torch.Tensor, norm: torch.Tensor, eps: float, rounding: str) -> torch.Tensor:
    """Return ``heads`` [T, h, D], each normalized by ``norm`` [D], or all together by [h·D]."""
    if len(norm) == heads.shape[2]:
        return rms_norm(heads, norm, eps, rounding)
    return rms_norm(heads.flatten(1), norm, eps, rounding).view(heads.shape)


# The pools of layers that write nothing have more heads than ``kv_heads``.
_POOLS = (POOL_AXES[0], "pool_heads", *POOL_AXES[2:])

OP = OpSpec(
    name="RmsQkvRope",
    doc="RMSNorm, Q, K and V projections, norms of heads, rotation; K and V go into page slots.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("norm", "W", ("K",), optional=True),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("bias", "W", ("N",), optional=True),
        TensorSpec("q_norm", "W", ("q_normed",), optional=True),
        TensorSpec("k_norm", "W", ("k_normed",), optional=True),
        TensorSpec("cos", "float32", ("P_and_factors", "half")),
        TensorSpec("sin", "float32", ("P", "half")),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("write_slot", "int32", ("T",)),
        TensorSpec("k_pool", "C", _POOLS),
        TensorSpec("v_pool", "C", _POOLS),
    ),
    outputs=(
        TensorSpec("q", "T", ("T", "heads", "head_dim")),
        TensorSpec("k_pool_out", "C", _POOLS),
        TensorSpec("v_pool_out", "C", _POOLS),
    ),
    attributes=(
        AttributeSpec("q_heads", int),
        AttributeSpec("kv_heads", int),
        AttributeSpec("eps", float),
        AttributeSpec("rounding", str, "gpt_oss"),
        AttributeSpec("head_rounding", str, "llama"),
        AttributeSpec("value_norm", int, 0),
        AttributeSpec("growth", int, 0),
    ),
    aliases=(("k_pool_out", "k_pool"), ("v_pool_out", "v_pool")),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), looked_up=("cos", "sin")),
)
