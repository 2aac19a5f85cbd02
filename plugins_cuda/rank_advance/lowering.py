"""RankAdvance on a GPU: one thread."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch."""
    launch = OpLaunch(
        Kernel("rank_advance", "advance_rounds", hot=False),
        grid=(1, 1, 1),
        block=1,
        shared_bytes=0,
        arguments=("state", int(request.attributes["rounds"])),
    )
    return Lowering((launch,))
