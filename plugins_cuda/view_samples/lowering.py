"""The launch of ViewSamples."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.view_inputs.lowering import require_sequences

_BLOCK = 256
_POINTERS = (
    "row_token_ids",
    "row_positions",
    "row_start",
    "logit_rows",
    "fed_again",
    "row_temperature",
    "row_top_k",
    "row_top_p",
    "row_seed",
    "positions",
    "row_floor",
    "chosen_rows",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "position",
    "sample_sequence",
    "sample_token",
    "floor",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one CTA: a launch of 256 rows samples at no more of them."""
    (batch,) = request.tensors["fed_again"].shape
    (rows,) = request.tensors["logit_rows"].shape
    require_sequences("ViewSamples", batch)
    samples = int(request.attributes["samples"])
    launch = OpLaunch(
        kernel=Kernel("view_samples", "view_samples"),
        grid=(1, 1, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, batch, rows // batch, samples),
    )
    return Lowering((launch,))
