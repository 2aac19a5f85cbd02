"""RmsLowRank: norm, the low-rank projections of MLA, their norms, and the cache entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_write.op import reference as kv_write
from specbuild.plugins_cuda.linear.block_scaled import decoded
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.mla_attention.op import LATENT_POOL_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_low_rank.lowering import lower, tactics
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.rms_qkv_rope.op import rotate
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    q_norm: torch.Tensor | None,
    latent_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    write_slot: torch.Tensor,
    c_pool: torch.Tensor,
    *,
    eps: float,
    rounding: str,
    latent_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the queries, q [T, Nq], and the pool with ``[c | r | 0]`` written.

    ``x`` [T, K] passes through the norm of this ``rounding`` if there is one. ``weight`` [Nq + L +
    R, K], packed by ``pack_rows``, has the rows of W_q_a (or W_q), then those of W_kv_a. The
    projection is rounded first. Then ``latent_norm`` [L] normalizes the latent c, and the optional
    ``q_norm`` [Nq] normalizes q; both norms are LLaMA's with ``latent_eps``. r [R] is rotated with
    ``cos``, ``sin`` fp32 [positions, R/2]. Entries of the pool may be wider than L + R.
    """
    import torch

    rank, rope = latent_norm.shape[0], 2 * cos.shape[1]
    normed = x if norm is None else rms_norm(x, norm, eps, rounding)
    rows = unpack_rows(decoded(weight, x.shape[1])).float()
    projected = (normed.float() @ rows.T).to(x.dtype)
    q, latent, key = projected.split([len(rows) - rank - rope, rank, rope], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, latent_eps, "llama")
    entry = x.new_zeros(len(x), 1, c_pool.shape[3])
    entry[:, 0, :rank] = rms_norm(latent, latent_norm, latent_eps, "llama")
    entry[:, :, rank : rank + rope] = rotate(key.unsqueeze(1), cos, sin, positions)
    return q.clone(memory_format=torch.contiguous_format), kv_write(c_pool, entry, write_slot)


OP = OpSpec(
    name="RmsLowRank",
    doc="RMSNorm and MLA's low-rank projections with their norms; the entry goes into its slot.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("norm", "W", ("K",), optional=True),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("q_norm", "W", ("Nq",), optional=True),
        TensorSpec("latent_norm", "W", ("rank",)),
        TensorSpec("cos", "float32", ("P", "half")),
        TensorSpec("sin", "float32", ("P", "half")),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("write_slot", "int32", ("T",)),
        TensorSpec("c_pool", "T", LATENT_POOL_AXES),
    ),
    outputs=(
        TensorSpec("q", "T", ("T", "Nq")),
        TensorSpec("c_pool_out", "T", LATENT_POOL_AXES),
    ),
    attributes=(
        AttributeSpec("eps", float),
        AttributeSpec("rounding", str, "llama"),
        AttributeSpec("latent_eps", float),
    ),
    aliases=(("c_pool_out", "c_pool"),),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), looked_up=("cos", "sin")),
)
