"""Capture on a GPU: 16 bytes per thread."""

from __future__ import annotations

from specbuild.plugins_cuda.embed.lowering import THREADS, vectors_of
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch, for any number of rows."""
    rows, width = request.tensors["x"].shape
    vectors = vectors_of("Capture", width)
    constants = (
        ("VECTORS", vectors),
        ("CAPTURED_VECTORS", vectors_of("Capture", request.tensors["captured"].shape[1])),
        ("COLUMN", request.attributes["column"]),
        ("THREADS", THREADS),
    )
    launch = OpLaunch(
        Kernel("capture", "capture", constants),
        grid=(-(-rows * vectors // THREADS), 1, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=("x", "captured", rows),
    )
    return Lowering((launch,))
