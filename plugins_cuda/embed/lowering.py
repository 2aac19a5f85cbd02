"""Embed on a GPU: 16 bytes a thread."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

THREADS = 128
_VECTOR = 8


def vectors_of(op: str, width: int) -> int:
    """16-byte vectors of a row of bf16; SpecbuildError where it is not made of whole ones."""
    if width % _VECTOR:
        raise SpecbuildError(
            f"{op}: rows of {width} values, its kernel takes multiples of {_VECTOR}; build for "
            "the cpu backend"
        )
    return width // _VECTOR


def lower(request: LoweringRequest) -> Lowering:
    """One launch, for any number of rows."""
    rows, width = request.tensors["x"].shape
    vectors = vectors_of("Embed", width)
    packed = len(request.tensors["table"].shape) == 3
    scale = float(request.attributes["scale"])
    constants = (
        ("VECTORS", vectors),
        ("THREADS", THREADS),
        ("PACKED", int(packed)),
        ("SCALE", scale),
    )
    launch = OpLaunch(
        Kernel("embed", "embed", constants),
        grid=(-(-rows * vectors // THREADS), 1, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=("token_ids", "table", "x", rows),
    )
    return Lowering((launch,))
