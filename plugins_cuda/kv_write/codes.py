"""Keys and values of a cache as e4m3 codes, a byte each: how they are rounded, and read again.

A pool of uint8 holds codes of OCP's 8-bit floating point (e4m3, without infinities): a value is
rounded to the nearest of them, ties to even, and what lies beyond ±448 becomes ±448. There is no
scale: a code depends on its value alone, so what a row stores depends on nothing that shares its
launch, and moving a slot moves its bytes. Zeros are stored without their sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
# Exponents of the least normal number and of the largest one; bits of the mantissa.
_LEAST, _MOST, _MANTISSA = -6, 8, 3
_SIGN = 128


def holds_codes(pool: ir.Value) -> bool:
    """Whether a pool of a graph holds codes."""
    return pool.dtype == ir.DataType.UINT8


def as_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 of a tensor of any float type."""
    import torch

    bounded = values.float().clamp(-LARGEST, LARGEST)
    codes = bounded.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.where(codes != _SIGN, 0)


def as_values(pool: torch.Tensor) -> torch.Tensor:
    """fp32 of a pool of codes; another pool as it is."""
    import torch

    if pool.dtype != torch.uint8:
        return pool
    return pool.view(torch.float8_e4m3fn).float()


def encoded(b: BodyBuilder, values: ir.Value) -> ir.Value:
    """uint8 of fp32, in standard ops.

    A magnitude is counted in steps of an eighth of its power of two, of 2^-9 below 2^-6. The
    logarithm may put what is just below a power of two into the next binade: there it is rounded
    to that power in either.
    """
    magnitude = b.Min(b.Abs(values), b.scalar(LARGEST))
    exponent = b.Floor(b.Add(b.Mul(b.Log(magnitude), b.scalar(1 / np.log(2))), b.scalar(1e-3)))
    binade = b.Max(b.Sub(exponent, b.scalar(float(_LEAST))), b.scalar(0.0))
    steps = [2.0 ** (e - _MANTISSA) for e in range(_LEAST, _MOST + 1)]
    # Clipped, since what is no number must not look elsewhere.
    place = b.Max(b.cast(binade, ir.DataType.INT32), b.scalar(0, np.int32))
    step = b.Gather(b.constant(steps, np.float32), b.Min(place, b.scalar(len(steps) - 1, np.int32)))
    code = b.Add(b.Mul(binade, b.scalar(float(1 << _MANTISSA))), b.Round(b.Div(magnitude, step)))
    zero = b.scalar(0.0)
    negative = b.And(b.Less(values, zero), b.Greater(code, zero))
    signed = b.Add(code, b.Where(negative, b.scalar(float(_SIGN)), zero))
    result: ir.Value = b.cast(signed, ir.DataType.UINT8)
    return result


def decoded(b: BodyBuilder, codes: ir.Value) -> ir.Value:
    """fp32 of uint8, in standard ops."""
    table = b.constant([_value(code) for code in range(256)], np.float32)
    result: ir.Value = b.Gather(table, b.cast(codes, ir.DataType.INT32))
    return result


def _value(code: int) -> float:
    """What a code means; those of no number, which nobody stores, as 0."""
    sign = -1.0 if code & _SIGN else 1.0
    exponent, fraction = divmod(code & (_SIGN - 1), 1 << _MANTISSA)
    if code & (_SIGN - 1) == _SIGN - 1:
        return 0.0
    if exponent == 0:
        return sign * fraction * 2.0 ** (_LEAST - _MANTISSA)
    return sign * (1 + fraction / (1 << _MANTISSA)) * 2.0 ** (exponent + _LEAST - 1)
