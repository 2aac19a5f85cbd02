"""RmsIndexer: norm and an indexer's projections, with the key in its cache slot (DSA-lite)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.dsa_indexer.key_types import as_cached
from specbuild.plugins_cuda.dsa_indexer.op import INDEXER_POOL_AXES
from specbuild.plugins_cuda.kv_write.op import reference as kv_write
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_indexer.lowering import lower, tactics
from specbuild.plugins_cuda.rms_indexer.packing import unpack_indexer
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    write_slot: torch.Tensor,
    key_pool: torch.Tensor,
    *,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, n_idx, d], the heads' weights [T, n_idx], and the pool with the keys.

    ``x`` [T, K] passes through GPT-OSS's norm if there is one. ``weight`` is packed by
    ``pack_indexer``. Without rows for head weights (one head, the simple form) every weight is 1.
    Nothing is rotated. A pool of bytes (uint8) stores keys as fp8 (e4m3), clamped to ±448.
    """
    width = key_pool.shape[3]
    normed = (x if norm is None else rms_norm(x, norm, eps, "gpt_oss")).float()
    q_rows, k_rows, h_rows = unpack_indexer(weight, heads, width)
    q, k = ((normed @ rows.float().T).to(x.dtype) for rows in (q_rows, k_rows))
    weights = x.new_ones(len(x), heads)
    if len(h_rows):
        weights = (normed @ h_rows[:heads].float().T).to(x.dtype)
    keys = as_cached(k.unsqueeze(1), key_pool)
    return q.view(-1, heads, width), weights, kv_write(key_pool, keys, write_slot)


OP = OpSpec(
    name="RmsIndexer",
    doc="RMSNorm, an indexer's queries and head weights; its key goes into its page slot.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("norm", "W", ("K",), optional=True),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("write_slot", "int32", ("T",)),
        TensorSpec("key_pool", "C", INDEXER_POOL_AXES),
    ),
    outputs=(
        TensorSpec("q", "T", ("T", "n_idx", "d_idx")),
        TensorSpec("head_weights", "T", ("T", "n_idx")),
        TensorSpec("key_pool_out", "C", INDEXER_POOL_AXES),
    ),
    attributes=(AttributeSpec("heads", int), AttributeSpec("eps", float)),
    aliases=(("key_pool_out", "key_pool"),),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",)),
)
