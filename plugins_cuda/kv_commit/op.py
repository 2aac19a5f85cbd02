"""KvCommit: the accepted nodes' keys or values move to the committed slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_commit.body import body
from specbuild.plugins_cuda.kv_commit.lowering import lower
from specbuild.plugins_cuda.kv_write.op import POOL_AXES, POOL_BODY_AXES
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def reference(pool: torch.Tensor, from_slot: torch.Tensor, to_slot: torch.Tensor) -> torch.Tensor:
    """Return ``pool`` with the entry of slot ``from_slot[b, i]`` copied to ``to_slot[b, i]``.

    All reads come before all writes. A pair with a negative side (padding) or with equal sides has
    no effect.
    """
    page_size = pool.shape[2]
    moved = (from_slot >= 0) & (to_slot >= 0) & (from_slot != to_slot)
    source, target = from_slot[moved].long(), to_slot[moved].long()
    out = pool.clone()
    out[target // page_size, :, target % page_size] = pool[
        source // page_size, :, source % page_size
    ]
    return out


OP = OpSpec(
    name="KvCommit",
    doc="Moves the accepted nodes' cache entries to the committed positions.",
    inputs=(
        TensorSpec("pool", "T", POOL_AXES, body_axes=POOL_BODY_AXES),
        TensorSpec("from_slot", "int32", ("B", "D1")),
        TensorSpec("to_slot", "int32", ("B", "D1")),
    ),
    outputs=(TensorSpec("pool_out", "T", POOL_AXES, body_axes=POOL_BODY_AXES),),
    attributes=(),
    aliases=(("pool_out", "pool"),),
    reference=reference,
    body=body,
    lower=lower,
    traffic=NoTraffic("moves a few entries a sequence"),
)
