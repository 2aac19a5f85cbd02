"""PathCommit: the cache entries of the accepted path move to the committed slots, all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.path_commit.lowering import lower
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch

POOLS_AXES = ("parts", "pages", "kv_heads", "page_size", "width")


def reference(
    pools: torch.Tensor, path: torch.Tensor, length: torch.Tensor, page_table: torch.Tensor
) -> torch.Tensor:
    """Return ``pools`` with slot ``length[b] + path[b, i]`` copied to slot ``length[b] + i``.

    ``pools`` [parts, pages, kv_heads, page_size, width] holds the keys and the values of every
    layer of a cache group, which share the table. All reads come before all writes. An entry with
    ``path[b, i]`` negative (padding) or equal to ``i`` has no effect. ``page_table`` [B, P] is the
    page of each logical page of a sequence.
    """
    import torch

    page_size = pools.shape[3]
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    sequence = torch.arange(path.shape[0], device=path.device).unsqueeze(1).expand_as(path)
    moved = (path >= 0) & (path != place)
    table = page_table.long()[sequence[moved]]
    start = length.unsqueeze(1).expand_as(path)[moved].long()

    def entry(slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table.gather(1, (slot // page_size).unsqueeze(1)).squeeze(1), slot % page_size

    from_page, from_offset = entry(start + path[moved])
    to_page, to_offset = entry(start + place[moved])
    out = pools.clone()
    out[:, to_page, :, to_offset] = pools[:, from_page, :, from_offset]
    return out


OP = OpSpec(
    name="PathCommit",
    doc="Moves the accepted path's keys and values to the committed positions, in all layers.",
    inputs=(
        TensorSpec("pools", "T", POOLS_AXES),
        TensorSpec("path", "int32", ("B", "D1")),
        TensorSpec("length", "int32", ("B",)),
        TensorSpec("page_table", "int32", ("B", "P")),
    ),
    outputs=(TensorSpec("pools_out", "T", POOLS_AXES),),
    attributes=(),
    aliases=(("pools_out", "pools"),),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("moves a few entries a sequence"),
)
