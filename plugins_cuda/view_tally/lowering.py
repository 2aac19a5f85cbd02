"""The launch of ViewTally."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch

_BLOCK = 128
_POINTERS = (
    "choice",
    "sample_sequence",
    "sample_token",
    "fed_again",
    "step",
    "ring_rechecked",
    "ring_agreed",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with one thread per sequence."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    (batch,) = shapes["fed_again"]
    ring_entries, ring_batch = shapes["ring_rechecked"]
    sizes = (shapes["choice"][0], shapes["sample_token"][0], batch, ring_entries, ring_batch)
    launch = OpLaunch(
        kernel=Kernel("view_tally", "view_tally"),
        grid=(-(-batch // _BLOCK), 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, *sizes),
    )
    return Lowering((launch,))
