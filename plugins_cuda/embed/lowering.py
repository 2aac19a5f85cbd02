"""Embed on a GPU: 16 bytes per thread, or a row's part of some units per warp if quantized."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.linear.code_units import UNIT_COLUMNS
from specbuild.plugins_cuda.linear.storage import storage_of
from specbuild.runtime.errors import SpecbuildError

THREADS = 128
_VECTOR = 8
_WARPS, _UNITS_OF_WARP = 4, 4


def vectors_of(op: str, width: int) -> int:
    """Return the 16-byte vectors of a row of bf16; SpecbuildError for incomplete ones."""
    if width % _VECTOR:
        raise SpecbuildError(
            f"{op}: got rows of {width} values, expected a multiple of {_VECTOR}; build for the "
            "cpu backend"
        )
    return width // _VECTOR


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch, for any number of rows."""
    if request.tensors["table"].dtype in ("uint8", "int32"):
        return _lower_coded(request)
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


def _lower_coded(request: LoweringRequest) -> Lowering:
    rows, width = request.tensors["x"].shape
    table = request.tensors["table"]
    units = table.shape[1]
    if width != units * UNIT_COLUMNS:
        raise SpecbuildError(
            f"Embed: got rows of {width} values and a table of {units} units of {UNIT_COLUMNS} "
            "columns; build with --weights-dtype bf16"
        )
    constants = (
        ("WEIGHTS", storage_of(table).code),
        ("UNITS", units),
        ("WARPS", _WARPS),
        ("UNITS_OF_WARP", _UNITS_OF_WARP),
        ("SCALE", float(request.attributes["scale"])),
    )
    launch = OpLaunch(
        Kernel("embed", "embed_coded", constants, "coded.cu"),
        grid=(rows, -(-units // (_WARPS * _UNITS_OF_WARP)), 1),
        block=_WARPS * 32,
        shared_bytes=0,
        arguments=("token_ids", "table", "x"),
    )
    return Lowering((launch,))
