"""Keys and values of a cache as e4m3: quantization and dequantization.

A pool of uint8 holds 8-bit floating point values of OCP (e4m3, without infinities). A value is
rounded to the nearest one, ties to even, and clamped to ±448. There is no scale: the stored byte
depends on the value only, not on other rows of the launch, and a commit moves bytes. Zeros are
stored without their sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
# Exponents of the smallest normal number and of the largest number; bits of the mantissa.
_LEAST, _MOST, _MANTISSA = -6, 8, 3
_SIGN = 128


def holds_codes(pool: ir.Value) -> bool:
    """Return whether a pool of a graph is quantized."""
    return pool.dtype == ir.DataType.UINT8


def as_codes(values: torch.Tensor) -> torch.Tensor:
    """Quantize a tensor of any float type to uint8."""
    import torch

    bounded = values.float().clamp(-LARGEST, LARGEST)
    codes = bounded.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.where(codes != _SIGN, 0)


def as_values(pool: torch.Tensor) -> torch.Tensor:
    """Dequantize a uint8 pool to fp32; return other pools unchanged."""
    import torch

    if pool.dtype != torch.uint8:
        return pool
    return pool.view(torch.float8_e4m3fn).float()


def encoded(b: BodyBuilder, values: ir.Value) -> ir.Value:
    """Quantize fp32 to uint8 in standard ops.

    A magnitude is rounded to steps of an eighth of its power of two, or of 2^-9 below 2^-6. The
    logarithm of a value just below a power of two may be rounded to the next binade. This has no
    effect, because the value is rounded to that power in both.
    """
    magnitude = b.Min(b.Abs(values), b.scalar(LARGEST))
    exponent = b.Floor(b.Add(b.Mul(b.Log(magnitude), b.scalar(1 / np.log(2))), b.scalar(1e-3)))
    binade = b.Max(b.Sub(exponent, b.scalar(float(_LEAST))), b.scalar(0.0))
    steps = [2.0 ** (e - _MANTISSA) for e in range(_LEAST, _MOST + 1)]
    # Clamped, so that NaN does not index out of range.
    place = b.Max(b.cast(binade, ir.DataType.INT32), b.scalar(0, np.int32))
    step = b.Gather(b.constant(steps, np.float32), b.Min(place, b.scalar(len(steps) - 1, np.int32)))
    code = b.Add(b.Mul(binade, b.scalar(float(1 << _MANTISSA))), b.Round(b.Div(magnitude, step)))
    zero = b.scalar(0.0)
    negative = b.And(b.Less(values, zero), b.Greater(code, zero))
    signed = b.Add(code, b.Where(negative, b.scalar(float(_SIGN)), zero))
    result: ir.Value = b.cast(signed, ir.DataType.UINT8)
    return result


def decoded(b: BodyBuilder, codes: ir.Value) -> ir.Value:
    """Dequantize uint8 to fp32 in standard ops."""
    table = b.constant([_value(code) for code in range(256)], np.float32)
    result: ir.Value = b.Gather(table, b.cast(codes, ir.DataType.INT32))
    return result


def _value(code: int) -> float:
    """Return the value of a byte; those of NaN, which are not stored, are 0."""
    sign = -1.0 if code & _SIGN else 1.0
    exponent, fraction = divmod(code & (_SIGN - 1), 1 << _MANTISSA)
    if code & (_SIGN - 1) == _SIGN - 1:
        return 0.0
    if exponent == 0:
        return sign * fraction * 2.0 ** (_LEAST - _MANTISSA)
    return sign * (1 + fraction / (1 << _MANTISSA)) * 2.0 ** (exponent + _LEAST - 1)
