"""MXFP4: blocks of 32 four-bit values that share one power-of-two scale.

A value is `e2m1 * 2**(scale - 127)`. The 32 values of a block lie along a weight's input dimension,
packed in 16 bytes with the even element in the low nibble.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specbuild.plugins_cuda.moe.e2m1 import E2M1, E2M1_CODES

BLOCK_VALUES = 32
BLOCK_BYTES = 16
SCALE_BIAS = 127
# A scale of at least 1 is a normal float32 power of two, so a kernel may build it as `scale << 23`.
SMALLEST_SCALE = 1
LARGEST_SCALE = 254
SIGN_BIT = 8


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight [..., n*32] of u8 `blocks` [..., n, 16] and u8 `scales` [..., n].

    Raises:
        ValueError: the dtypes or shapes are not those of MXFP4.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"MXFP4 tensors: got {blocks.dtype} blocks and {scales.dtype} scales, "
            "expected uint8 for both"
        )
    if blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise ValueError(
            f"MXFP4 blocks: got shape {list(blocks.shape)}, expected "
            f"{[*scales.shape, BLOCK_BYTES]} for scales of shape {list(scales.shape)}"
        )
    table = torch.tensor(E2M1_CODES, dtype=torch.float32, device=blocks.device)
    nibbles = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # [..., n, 32]
    values = torch.ldexp(table[nibbles.int()], scales.int()[..., None] - SCALE_BIAS)
    return values.flatten(-2)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return u8 blocks [..., n, 16] and u8 scales [..., n] nearest to `weight` [..., n*32].

    Values round to nearest, ties to the even code. Each block takes the better of two scales: the
    one that puts its largest magnitude in [4, 8) e2m1 units (saturating above 6) and the next one
    up, which never saturates. Scales stay within 1..128 for magnitudes from 2**-124 to 12.

    Raises:
        ValueError: the last dimension is no multiple of 32, or a value is not finite.
    """
    if weight.shape[-1] % BLOCK_VALUES:
        raise ValueError(
            f"MXFP4 weight: got {weight.shape[-1]} inputs, expected a multiple of {BLOCK_VALUES}"
        )
    if not torch.isfinite(weight).all():
        raise ValueError("MXFP4 weight: got NaN or infinity, expected finite values")
    blocked = _blocked(weight)
    codes, scales = _encode(blocked)
    nibbles = (codes + SIGN_BIT * blocked.signbit()).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales.squeeze(-1).to(torch.uint8)


def fake_quantise(weight: Tensor) -> Tensor:
    """Return `dequantise(*quantise(weight))` in float32 without packing, to train with."""
    blocked = _blocked(weight)
    codes, scales = _encode(blocked)
    return (_decode(codes, scales) * blocked.sign()).flatten(-2)


def _blocked(weight: Tensor) -> Tensor:
    """Return `weight` [..., n*32] as float32 [..., n, 32]."""
    return weight.float().unflatten(-1, (-1, BLOCK_VALUES))


def _encode(blocked: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 magnitude codes [..., n, 32] and scales [..., n, 1] of float32 `blocked`."""
    magnitude = blocked.abs()
    largest = magnitude.amax(-1, keepdim=True)
    # A float32's exponent field is floor(log2) + 127; two less puts the largest value in [4, 8).
    tight = (largest.view(torch.int32) >> 23) - 2
    rounded = []
    for candidate in (tight, tight + 1):
        scales = candidate.clamp(SMALLEST_SCALE, LARGEST_SCALE)
        codes = _round_to_code(magnitude * _power_of_two(2 * SCALE_BIAS - scales))
        error = (_decode(codes, scales) - magnitude).square().sum(-1, keepdim=True)
        rounded.append((codes, scales, error))
    (codes, scales, error), (wider_codes, wider_scales, wider_error) = rounded
    wider = wider_error < error
    return torch.where(wider, wider_codes, codes), torch.where(wider, wider_scales, scales)


def _round_to_code(units: Tensor) -> Tensor:
    """Return the int32 e2m1 code 0..7 nearest to each unit >= 0, ties to the even code."""
    code = torch.zeros_like(units, dtype=torch.int32)
    for below, (low, high) in enumerate(pairwise(E2M1)):
        midpoint = (low + high) / 2
        # Between codes `below` and `below + 1`: the tie goes up exactly where `below` is odd.
        code = code + ((units >= midpoint) if below % 2 else (units > midpoint)).int()
    return code


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 magnitudes of e2m1 `codes` at int32 `scales`."""
    # Codes 2..7 are 2**(c // 2 - 1) * (1 + (c % 2) / 2); codes 0 and 1 are the subnormals c / 2.
    exponent = (codes >> 1).clamp(min=1)
    mantissa = torch.where(codes > 1, 2 + (codes & 1), codes).float() * 0.25
    return mantissa * (1 << exponent).float() * _power_of_two(scales)


def _power_of_two(biased: Tensor) -> Tensor:
    """Return float32 2**(biased - 127) of int32 exponents 0..254, subnormal at 0."""
    normal = (biased.clamp(min=1) << 23).view(torch.float32)
    return torch.where(biased >= 1, normal, normal * 0.5)
