"""Quantized weights in the form of ONNX Runtime's MatMulNBits: unsigned codes in blocks along K.

The operator computes ``(code - zero point) * scale``, with the middle of the codes as its default
zero point. A weight that also has minima is that product plus the block sums of the input times a
small float32 matrix. Codes are stored around the middle: the operator rounds its input to int8 per
block, and codes far from zero would multiply that error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbuild.builder.checkpoint.quantization.tensor import QuantizedForm, QuantizedTensor

# Block sizes for which the operator has fast kernels. Larger groups repeat their scales.
BLOCK_SIZES = (128, 64, 32, 16)
NIBBLE_BITS, BYTE_BITS = 4, 8


@dataclass(frozen=True)
class BlockForm:
    """The operator's form of a weight: codes of ``bits`` bits in blocks of ``size`` columns."""

    bits: int
    size: int
    has_block_sums: bool
    has_zero_points: bool

    @property
    def middle(self) -> int:
        """The default zero point of the operator."""
        return 1 << (self.bits - 1)

    @property
    def label(self) -> str:
        """The text for reports and manifests."""
        return f"{self.bits} bits, blocks of {self.size}"


def block_form(form: QuantizedForm, columns: int) -> BlockForm | str:
    """Return the operator's form of a weight with this many columns, or why it has none."""
    if form.code_type == "e4m3":
        return "ONNX Runtime has no product with FP8 weights on a CPU"
    if form.code_type == "float":
        return "its values are no multiples of a scale"
    size = next((size for size in BLOCK_SIZES if form.block[1] % size == 0), None)
    if size is None or columns % size:
        return f"groups of {form.block[1]} do not divide {columns} columns into supported blocks"
    if form.has_minima and form.has_zero_points:
        return "it has minima and zero points"
    fits_nibble = form.code_type == "int" and form.bits <= NIBBLE_BITS
    return BlockForm(
        NIBBLE_BITS if fits_nibble else BYTE_BITS, size, form.has_minima, form.has_zero_points
    )


def block_codes(weight: QuantizedTensor, form: BlockForm) -> Tensor:
    """Return the operator's codes, uint8 [N, blocks, size * bits / 8], low nibbles first."""
    codes = sorted_columns(weight).to(torch.int16)
    codes = (codes + (_offset(weight, form))).to(torch.uint8).unflatten(1, (-1, form.size))
    if form.bits == BYTE_BITS:
        return codes
    return codes[..., 0::2] | codes[..., 1::2] << NIBBLE_BITS


def block_scales(weight: QuantizedTensor, form: BlockForm) -> Tensor:
    """Return the scale of every block, float32 [N, blocks]."""
    return _by_block(weight, weight.scales, form).contiguous()


def block_minima(weight: QuantizedTensor, form: BlockForm) -> Tensor:
    """Return the factors of the input's block sums, float32 [N, blocks].

    A weight is ``(code - middle) * scale`` plus the factor of its block.
    """
    assert weight.minima is not None
    # Computed in float64, where it is exact, so that it is rounded only once.
    from_middle = form.middle - _offset(weight, form)
    factors = weight.scales.double() * from_middle + weight.minima.double()
    return _by_block(weight, factors, form).float().contiguous()


def block_zero_points(weight: QuantizedTensor, form: BlockForm) -> Tensor:
    """Return the zero point of every block, uint8 [N, ⌈blocks * bits / 8⌉], low nibbles first."""
    assert weight.zero_points is not None
    points = weight.zero_points + _offset(weight, form)
    points = _by_block(weight, points, form).to(torch.uint8)
    if form.bits == BYTE_BITS:
        return points.contiguous()
    points = torch.nn.functional.pad(points, (0, points.shape[1] % 2))
    return points[:, 0::2] | points[:, 1::2] << NIBBLE_BITS


def column_order(weight: QuantizedTensor) -> Tensor:
    """Return the order of columns that makes each group contiguous, int64 [K]."""
    assert weight.groups is not None
    return torch.argsort(weight.groups, stable=True)


def sorted_columns(weight: QuantizedTensor) -> Tensor:
    """Return the codes with the columns of each group contiguous."""
    return weight.codes if weight.groups is None else weight.codes[:, column_order(weight)]


def _offset(weight: QuantizedTensor, form: BlockForm) -> int:
    """Return the number to add to the checkpoint's codes: our middle minus theirs."""
    if weight.codes.dtype == torch.int8:
        return form.middle
    if form.has_zero_points:
        return 0
    return form.middle - (1 << (weight.form.bits - 1))


def _by_block(weight: QuantizedTensor, parts: Tensor, form: BlockForm) -> Tensor:
    """Return values per group [⌈N / rows⌉, groups] repeated to values per block, [N, blocks]."""
    rows, columns = weight.shape
    if weight.form.block[0] > 1:
        parts = parts.repeat_interleave(weight.form.block[0], dim=0)[:rows]
    per_group = weight.form.block[1] // form.size
    return parts.repeat_interleave(per_group, dim=1)[:, : columns // form.size]
