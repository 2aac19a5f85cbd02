"""Weights of codes times scales: floats of eight or four bits, and integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from specbuild.builder.checkpoint.quantization.packing import float_scales, unpack_e2m1
from specbuild.builder.checkpoint.quantization.scheme import (
    WEIGHT,
    Parts,
    misfit,
    part_bytes,
    quantized_weight,
)
from specbuild.builder.checkpoint.quantization.tensor import (
    Block,
    QuantizedForm,
    QuantizedTensor,
    ScaleFactors,
)
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor

SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0", "U8")
_MATRIX_AXES = 2
_E2M1_CODES_PER_BYTE = 2
NVFP4_GROUP, MXFP4_GROUP = 16, 32
_E2M1_TITLES = {NVFP4_GROUP: "nvfp4", MXFP4_GROUP: "mxfp4"}


def matrix_shape(weight: SourceTensor) -> tuple[int, int]:
    """Return rows and columns. SpecbuildError if the tensor is no matrix."""
    if len(weight.shape) != _MATRIX_AXES or 0 in weight.shape:
        raise misfit(weight, "a matrix")
    return weight.shape[0], weight.shape[1]


def grid_of(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """Return rows and columns of the scales of a matrix's blocks."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def block_of(shape: tuple[int, int], scale: SourceTensor) -> Block:
    """Return the block of a scale from the scales' shape: per tensor, row, or group of a row."""
    rows, columns = shape
    if math.prod(scale.shape) == 1:
        return rows, columns
    groups = scale.shape[-1] if len(scale.shape) == _MATRIX_AXES else 1
    if scale.shape in ((rows,), (rows, groups)) and groups and columns % groups == 0:
        return 1, columns // groups
    raise misfit(scale, f"a scale for the tensor, for each row, or for groups of a row of {shape}")


def scaled_weight(
    module: str,
    parts: Parts,
    scale: SourceTensor,
    *,
    block: Block | None = None,
    bits: int = 8,
    zero_points: Callable[[], Tensor] | None = None,
) -> SourceTensor:
    """Return the weight of a matrix of codes, a byte each; ``block`` None: by the scales' shape."""
    codes = parts[WEIGHT]
    shape = matrix_shape(codes)
    block = block_of(shape, scale) if block is None else block
    if _extents(scale.shape) != _extents(grid_of(shape, block)):
        raise misfit(scale, f"{list(grid_of(shape, block))} scales for blocks of {list(block)}")
    if scale.dtype not in SCALE_DTYPES:
        raise misfit(scale, "floats")
    is_float = codes.dtype == "F8_E4M3"
    form = QuantizedForm(
        f"{'fp8' if is_float else f'int{bits}'}{block_title(shape, block)}",
        "e4m3" if is_float else "int",
        bits,
        block,
        part_bytes(parts),
        has_zero_points=zero_points is not None,
        scale_dtype=scale.dtype,
    )

    def load() -> QuantizedTensor:
        return QuantizedTensor(
            form,
            codes.load(),
            float_scales(scale.load()).reshape(grid_of(shape, block)),
            zero_points=None if zero_points is None else zero_points(),
        )

    return quantized_weight(module, parts, form, shape, load)


def e2m1_weight(
    module: str,
    parts: Parts,
    packed: SourceTensor,
    scale: SourceTensor,
    *,
    group: int,
    scales: Callable[[], tuple[Tensor, Tensor | None]],
) -> SourceTensor:
    """Return the weight of packed four-bit floats with a scale for each ``group`` of a row.

    ``scales`` returns the scales in float32, for any storage, and NVFP4's factor of the tensor in
    float64, [1, 1]: the scales are its products with those that are stored.
    """
    rows, half = matrix_shape(packed)
    columns = half * _E2M1_CODES_PER_BYTE
    if scale.shape != (rows, -(-columns // group)) or columns % group:
        raise misfit(scale, f"a scale for each {group} of {columns} inputs of {rows} rows")
    form = QuantizedForm(
        _E2M1_TITLES[group],
        "e2m1",
        4,
        (1, group),
        part_bytes(parts),
        scale_dtype="F8_E8M0" if group == MXFP4_GROUP else "F32",
        has_factors=group == NVFP4_GROUP,
    )

    def load() -> QuantizedTensor:
        # Codes are the numbers times two, so that they are integers; half of a scale is exact.
        whole, factor = scales()
        factors = None
        if factor is not None:
            halves = (factor / 2).expand(rows, 1)
            factors = ScaleFactors(columns, halves, float_scales(scale.load()))
        return QuantizedTensor(form, unpack_e2m1(packed.load()), whole / 2, factors=factors)

    return quantized_weight(module, parts, form, (rows, columns), load)


def mxfp4_weight(
    module: str, parts: Parts, packed: SourceTensor, scale: SourceTensor
) -> SourceTensor:
    """Return the weight of MXFP4: a power of two for each 32 numbers."""
    if scale.dtype not in ("U8", "F8_E8M0"):
        raise misfit(scale, "exponents, a byte each")
    scales = partial(_loaded, scale)
    return e2m1_weight(module, parts, packed, scale, group=MXFP4_GROUP, scales=scales)


def block_title(shape: tuple[int, int], block: Block) -> str:
    """Return the name of a scale's extent in reports."""
    if block == shape:
        return " tensor"
    if block == (1, shape[1]):
        return " channel"
    return f" g{block[1]}" if block[0] == 1 else f" {block[0]}x{block[1]}"


def _extents(shape: tuple[int, ...]) -> list[int]:
    """Return the axes longer than 1: scales of a row may have one axis more or less."""
    return [size for size in shape if size != 1]


def _loaded(scale: SourceTensor) -> tuple[Tensor, None]:
    return float_scales(scale.load()), None
