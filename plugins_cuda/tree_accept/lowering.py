"""The launch of TreeAccept."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.engine_dir.plan import ITEM_BYTES

_POINTERS = (
    "tokens",
    "parents",
    "ancestor_bits",
    "count",
    "choice",
    "row_start",
    "path",
    "accepted",
    "next_token",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one warp per sequence."""
    batch, nodes = request.tensors["tokens"].shape
    launch = OpLaunch(
        kernel=Kernel("tree_accept", "tree_accept"),
        grid=(batch, 1, 1),
        block=32,
        shared_bytes=3 * nodes * ITEM_BYTES["int32"],
        arguments=(*_POINTERS, nodes, int(request.attributes["depth"])),
    )
    return Lowering((launch,))
