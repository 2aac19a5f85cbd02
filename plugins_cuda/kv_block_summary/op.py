"""KvBlockSummary: the channel-wise extremes of the keys of every newly completed block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.kv_block_summary.body import body
from specbuild.plugins_cuda.kv_block_summary.lowering import lower
from specbuild.plugins_cuda.kv_write.op import POOL_AXES, POOL_BODY_AXES
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch

SUMMARY_AXES = ("pages", "kv_heads", "2", "width")
SUMMARY_BODY_AXES = ("kv_heads", "pages", "2", "width")


def reference(
    summary_pool: torch.Tensor,
    k_pool: torch.Tensor,
    logical_pages: torch.Tensor,
    first_block: torch.Tensor,
    blocks: torch.Tensor,
    *,
    sink_pages: int,
    block_pages: int,
) -> torch.Tensor:
    """Return ``summary_pool`` [pages, kv_heads, 2, D] with the new blocks of each sequence.

    The new blocks are ``first_block[b] … blocks[b] − 1``; there are none if ``first_block[b] >=
    blocks[b]``. ``logical_pages`` [B, P] are the sequences' pages in order of position. Block i has
    the ``block_pages`` logical pages from ``sink_pages + i·block_pages`` on. The entry of its first
    page receives the maximum (0) and the minimum (1) of its keys, per channel and KV head. The
    entry of page 0 is unspecified.
    """
    out = summary_pool.clone()
    for sequence in range(logical_pages.shape[0]):
        for block in range(int(first_block[sequence]), int(blocks[sequence])):
            start = sink_pages + block * block_pages
            pages = logical_pages[sequence, start : start + block_pages].long()
            keys = k_pool[pages]
            out[pages[0], :, 0] = keys.amax(dim=(0, 2))
            out[pages[0], :, 1] = keys.amin(dim=(0, 2))
    return out


OP = OpSpec(
    name="KvBlockSummary",
    doc="Channel-wise maximum and minimum of the keys of newly completed blocks (SpecPV).",
    inputs=(
        TensorSpec("summary_pool", "T", SUMMARY_AXES, body_axes=SUMMARY_BODY_AXES),
        TensorSpec("k_pool", "T", POOL_AXES, body_axes=POOL_BODY_AXES),
        TensorSpec("logical_pages", "int32", ("B", "P")),
        TensorSpec("first_block", "int32", ("B",)),
        TensorSpec("blocks", "int32", ("B",)),
    ),
    outputs=(TensorSpec("summary_pool_out", "T", SUMMARY_AXES, body_axes=SUMMARY_BODY_AXES),),
    attributes=(AttributeSpec("sink_pages", int), AttributeSpec("block_pages", int)),
    aliases=(("summary_pool_out", "summary_pool"),),
    reference=reference,
    body=body,
    lower=lower,
    traffic=NoTraffic("reads a block of keys a sequence, when one is full"),
)
