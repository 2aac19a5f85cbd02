"""The launch of WeighHeads."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

_BLOCK = 256


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with a thread per two values; SpecbuildError for odd widths or not bf16."""
    q = request.tensors["q"]
    rows, heads, width = q.shape
    if q.dtype != "bfloat16" or width % 2:
        raise SpecbuildError(
            f"WeighHeads: got heads of {width} {q.dtype} values, expected an even number of "
            "bfloat16; build for the cpu backend"
        )
    pairs = width // 2
    launch = OpLaunch(
        kernel=Kernel("weigh_heads", "weigh_heads"),
        grid=(-(-rows * heads * pairs // _BLOCK), 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=("q", "head_weights", "weighted", rows * heads, pairs),
    )
    return Lowering((launch,))
