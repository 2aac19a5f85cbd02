"""SigmoidGate on a GPU: a thread per 8 values."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

THREADS = 128
VALUES = 8
SIGMOID, GELU = "sigmoid", "gelu_tanh"


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError for rows that are no multiple of 8 values."""
    (rows, columns), (_, gates) = (request.tensors[name].shape for name in ("x", "gate"))
    per_row, column = (int(request.attributes[name]) for name in ("per_row", "column"))
    activation = str(request.attributes["activation"])
    width = columns if per_row else gates
    if width % VALUES or column % VALUES or columns % VALUES or column + width > columns:
        raise SpecbuildError(
            f"SigmoidGate: got rows of {columns} values from {column} on and gates of {gates}, "
            f"expected multiples of {VALUES} and as many gates; build with --backend cpu"
        )
    if activation not in (SIGMOID, GELU):
        raise SpecbuildError(
            f"SigmoidGate: activation {activation!r} is unknown, expected {SIGMOID} or {GELU}; "
            "export the model again"
        )
    constants = (
        ("WIDTH", width),
        ("COLUMNS", columns),
        ("COLUMN", column),
        ("GATES", gates),
        ("PER_ROW", per_row),
        ("GELU", int(activation == GELU)),
        ("THREADS", THREADS),
    )
    vectors = rows * width // VALUES
    launch = OpLaunch(
        Kernel("sigmoid_gate", "sigmoid_gate", constants),
        grid=(-(-vectors // THREADS), 1, 1),
        block=THREADS,
        shared_bytes=0,
        arguments=("x", "gate", "y", vectors),
    )
    return Lowering((launch,))
