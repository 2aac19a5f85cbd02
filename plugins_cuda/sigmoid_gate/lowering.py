"""SigmoidGate on a GPU: a thread per 8 values."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

THREADS = 128
VALUES = 8


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError for rows that are no multiple of 8 values."""
    (rows, width), (_, gates) = (request.tensors[name].shape for name in ("x", "gate"))
    per_row = int(request.attributes["per_row"])
    if width % VALUES or (gates != width and not per_row):
        raise SpecbuildError(
            f"SigmoidGate: got rows of {width} values and gates of {gates}, expected multiples of "
            f"{VALUES} and as many gates; build with --backend cpu"
        )
    constants = (("WIDTH", width), ("GATES", gates), ("PER_ROW", per_row), ("THREADS", THREADS))
    vectors = rows * width // VALUES
    launch = OpLaunch(
        Kernel("sigmoid_gate", "sigmoid_gate", constants),
        grid=(-(-vectors // THREADS), 1, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=("x", "gate", "y", vectors),
    )
    return Lowering((launch,))
