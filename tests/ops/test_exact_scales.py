"""Scales in the form that kernels multiply by: every product has the bits of fp32 arithmetic.

e4m3: a scale has two bf16 parts, and a kernel rounds twice to bf16. The products of a scale with
e4m3 values of one mantissa, and the scales with one mantissa, differ by powers of two only.

int4 without zero points: a kernel rounds once, after an fma whose operands are exact.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.linear.byte_codes import scale_parts, scaled_by_parts
from specbuild.plugins_cuda.linear.code_units import split_bytes
from specbuild.plugins_cuda.linear.codec import SCALE, CodeForm, GroupedCodes, GroupPart
from specbuild.plugins_cuda.linear.group_codes import code_storage, pack_codes
from specbuild.plugins_cuda.linear.packing import BLOCK
from specbuild.plugins_cuda.linear.storage import (
    FP8_BLOCK,
    FP8_ROWS,
    INT4_BF16,
    INT4_SYMMETRIC,
    LOAD_BYTES,
    Storage,
)
from specbuild.plugins_cuda.linear.streaming import Dense, streaming
from specbuild.runtime.errors import SpecbuildError

_MANTISSAS = 1 << 23
_CHUNK = 1 << 19
# All finite e4m3 values.
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
VALUES = VALUES[VALUES.isfinite()][:, None]


def differing(values: torch.Tensor, scales: torch.Tensor) -> int:
    """Count products whose bf16 number is not that of the fp32 product."""
    products = scaled_by_parts(values, scale_parts(scales)).to(torch.bfloat16)
    return int((products != (values * scales).to(torch.bfloat16)).sum())


def scales_with(mantissas: torch.Tensor, exponent: int = 0) -> torch.Tensor:
    """Return the fp32 numbers of these mantissas (23 bits) from 2^exponent on."""
    return (mantissas.to(torch.int32) | (127 + exponent) << 23).view(torch.float32)


@pytest.mark.slow
def test_every_mantissa_has_parts() -> None:
    """Eight mantissas of e4m3 stand for all values."""
    eight = torch.arange(8, 16, dtype=torch.float32)[:, None]
    for first in range(0, _MANTISSAS, _CHUNK):
        scales = scales_with(torch.arange(first, first + _CHUNK))
        assert differing(eight, scales) == 0, f"mantissas from {first} on"


@pytest.mark.parametrize("exponent", [-90, -40, -9, 0, 6])
def test_every_value_has_the_bits_of_fp32(exponent: int) -> None:
    drawn = torch.randint(_MANTISSAS, (20000,), generator=torch.Generator().manual_seed(exponent))
    scales = scales_with(drawn, exponent)
    assert differing(VALUES, torch.cat((scales, -scales))) == 0


def test_the_difference_alone_is_not_enough() -> None:
    """Scales near the middle of two bf16 products need another second part."""
    scales = scales_with(torch.arange(0, _MANTISSAS, 1 << 9))
    first = scales.to(torch.bfloat16)
    parts = torch.stack((first, (scales - first.float()).to(torch.bfloat16)), dim=-1)
    products = scaled_by_parts(VALUES, parts).to(torch.bfloat16)
    wrong = (products != (VALUES * scales).to(torch.bfloat16)).any(0)
    assert 0.001 < float(wrong.float().mean()) < 0.01
    assert differing(VALUES, scales[wrong]) == 0


def test_zero_and_powers_of_two_need_one_part() -> None:
    scales = torch.tensor([0.0, 2.0**-60, 0.25, 64.0, -0.5])
    parts = scale_parts(scales)
    assert torch.equal(parts[:, 0].float(), scales)
    assert not parts[:, 1].any()


def test_symmetric_products_are_exact_before_their_rounding() -> None:
    """All scales from 2^-120 to 0.5, and all codes."""
    first, last = (int(torch.tensor(x).bfloat16().view(torch.int16)) for x in (2.0**-120, 0.5))
    scales = torch.arange(first, last, dtype=torch.int16).view(torch.bfloat16)
    rows = torch.zeros(len(scales), 64, dtype=torch.int8)
    packed = pack_codes(
        GroupedCodes(rows, {SCALE: GroupPart(scales.float()[:, None], 64)}), INT4_SYMMETRIC
    )
    _, stored = split_bytes(packed.view(torch.uint8), LOAD_BYTES, 32)
    # [tile, 1, g, h] to rows g + 8h of a tile.
    factors = stored.view(torch.bfloat16).view(-1, 8, 2).transpose(1, 2).flatten()
    assert factors.isfinite().all()
    offsets = (factors.float() * -(2.0**-126)).to(torch.bfloat16)
    assert torch.equal(offsets.float(), -8 * scales.float())
    codes = torch.arange(16, dtype=torch.float64)[:, None]
    sums = codes * 2.0**-129 * factors.double() + offsets.double()
    assert torch.equal(sums, (codes - 8) * scales.double())


@pytest.mark.parametrize(
    ("storage", "dtype", "scale"),
    [(FP8_BLOCK, torch.uint8, 128.0), (FP8_ROWS, torch.uint8, float("nan")),
     (INT4_SYMMETRIC, torch.int8, 0.5), (INT4_SYMMETRIC, torch.int8, 2.0**-121)],
)  # fmt: skip
def test_rejects_scales_out_of_range(storage: Storage, dtype: torch.dtype, scale: float) -> None:
    part = GroupPart(torch.full((16, 1), scale), 64)
    with pytest.raises(SpecbuildError, match=f"a scale of {scale:g}, expected 0 or"):
        pack_codes(GroupedCodes(torch.zeros(16, 64, dtype=dtype), {SCALE: part}), storage)


@pytest.mark.parametrize(
    ("columns", "storage"),
    [(4096, INT4_SYMMETRIC), (5120, INT4_SYMMETRIC), (11008, INT4_SYMMETRIC), (18944, INT4_BF16)],
)
def test_int4_without_zero_points_is_stored_for_whole_rounds(
    columns: int, storage: Storage
) -> None:
    """18944 columns have 19 steps for each of 16 warps, which no ring of 2 to 7 stages divides."""
    assert code_storage([CodeForm("int", 4, (1, 128), "BF16")], columns) is storage


@pytest.mark.parametrize(
    ("columns", "normed"),
    [*product((1536, 2048, 2560, 4096, 5120, 8192), (False, True)),
     (11008, False), (14336, False), (28672, False)],
)  # fmt: skip
def test_default_rings_of_such_weights_are_whole_rounds(columns: int, normed: bool) -> None:
    """A ring that does not divide the steps took 16.1 instead of 10.5 µs."""
    dense = Dense("Linear", 256, columns // BLOCK, 1, normed, INT4_SYMMETRIC)
    constants = dict(streaming(LoweringRequest({}, {}, "decode"), dense).constants)
    assert int(constants["RING"]) > 1
    assert dense.slice_units % int(constants["RING"]) == 0
