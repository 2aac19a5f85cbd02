"""DraftInput on a GPU: one CTA per normalized part of a row or, with many rows, one warp."""

from __future__ import annotations

from specbuild.plugins_cuda.embed.lowering import vectors_of
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.linear.streaming import MAX_ROWS, normed_bytes
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.runtime.errors import SpecbuildError

_MAX_WARPS = 16
_PIECE = 256
# More rows than a step has, and the warps of a CTA then.
_MANY_ROWS, _WARPS_OF_MANY = MAX_ROWS + 1, 8


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch, for any number of rows; SpecbuildError if a part is too wide for a CTA."""
    rows, all_segments = request.tensors["hidden"].shape
    segments = int(request.attributes["segments"])
    width = all_segments // segments
    vectors_of("DraftInput", width)
    embeds = "table" in request.tensors
    added = ("residual" in request.tensors, "factor" in request.tensors)
    if embeds and any(added):
        raise SpecbuildError(
            "DraftInput: got a residual or a factor together with an embedding, which its kernel "
            "does not support; build for the cpu backend"
        )
    is_many = rows >= _MANY_ROWS
    warps = _WARPS_OF_MANY if is_many else min(_MAX_WARPS, -(-width // _PIECE))
    shared = 0 if is_many else normed_bytes(width)
    if shared > request.target.shared_bytes_per_block:
        raise SpecbuildError(
            f"DraftInput: a row of {width} values needs {shared} bytes of shared memory, a CTA has "
            f"{request.target.shared_bytes_per_block}; build for the cpu backend"
        )
    constants = (
        ("WIDTH", width),
        ("WARPS", warps),
        ("HAS_TABLE", int(embeds)),
        ("PACKED", int(embeds and len(request.tensors["table"].shape) == 3)),
        ("SEGMENTS", segments),
        ("HAS_RESIDUAL", int(added[0])),
        ("HAS_FACTOR", int(added[1])),
        ("NORM_ROUNDING", rounding_code(rounding_of("DraftInput", request.attributes))),
        ("EPS", request.attributes["eps"]),
        ("SHARED_BYTES", shared),
    )
    entry, file = (
        ("draft_input_of_many", "many_rows.cu") if is_many else ("draft_input", "kernel.cu")
    )
    launch = OpLaunch(
        Kernel("draft_input", entry, constants, file=file),
        grid=(-(-rows // warps) if is_many else rows, segments + int(embeds), 1),
        block=warps * 32,
        shared_bytes=shared,
        arguments=(
            *("token_ids", "table", "embed_norm", "hidden", "hidden_norm", "residual", "factor"),
            "u",
            *((rows,) if is_many else ()),
        ),
    )
    return Lowering((launch,))
