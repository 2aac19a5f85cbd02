"""RmsQueryLatent: norm, query projection with RoPE, and the latent in its cache slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_write.op import reference as kv_write
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.mla_attention.op import LATENT_POOL_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.rms_qkv_rope.op import rotate
from specbuild.plugins_cuda.rms_qkv_rope.packing import unpair_rows
from specbuild.plugins_cuda.rms_query_latent.lowering import lower, tactics
from specbuild.plugins_cuda.rms_query_latent.packing import unpack_query_latent
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    write_slot: torch.Tensor,
    c_pool: torch.Tensor,
    *,
    q_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated q [T, q_heads, D], and the pool with ``c = rms(x) W_c`` written.

    ``x`` [T, K] passes through GPT-OSS's norm if there is one. ``weight`` is packed by
    ``pack_query_latent``, ``bias`` by ``pack_query_bias``; ``cos``, ``sin`` fp32 [positions, D/2].
    The query projection is rounded before and after RoPE.
    """
    latent, head_dim = c_pool.shape[3], 2 * cos.shape[1]
    normed = (x if norm is None else rms_norm(x, norm, eps, "gpt_oss")).float()
    q_rows, c_rows = unpack_query_latent(weight, head_dim, latent)
    q, c = normed @ q_rows.float().T, normed @ c_rows.float().T
    if bias is not None:
        q = q + unpair_rows(bias[:-latent], head_dim).float()
    heads = q.to(x.dtype).view(x.shape[0], q_heads, head_dim)
    return (
        rotate(heads, cos, sin, positions),
        kv_write(c_pool, c.to(x.dtype).unsqueeze(1), write_slot),
    )


OP = OpSpec(
    name="RmsQueryLatent",
    doc="RMSNorm, query projection with bias and rotation; the latent goes into its page slot.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("norm", "W", ("K",), optional=True),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("bias", "W", ("N",), optional=True),
        TensorSpec("cos", "float32", ("P", "half")),
        TensorSpec("sin", "float32", ("P", "half")),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("write_slot", "int32", ("T",)),
        TensorSpec("c_pool", "T", LATENT_POOL_AXES),
    ),
    outputs=(
        TensorSpec("q", "T", ("T", "heads", "head_dim")),
        TensorSpec("c_pool_out", "T", LATENT_POOL_AXES),
    ),
    attributes=(AttributeSpec("q_heads", int), AttributeSpec("eps", float)),
    aliases=(("c_pool_out", "c_pool"),),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), looked_up=("cos", "sin")),
)
