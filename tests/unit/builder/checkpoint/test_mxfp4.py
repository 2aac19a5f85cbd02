"""MXFP4 packing against a scalar table and against transformers' own reader."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specbuild.builder.checkpoint import mxfp4

TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def scalar_dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode one nibble at a time; blocks u8 [n, 16], scales u8 [n] -> float32 [n*32]."""
    values = []
    for block, scale in zip(blocks.tolist(), scales.tolist(), strict=True):
        for byte in block:
            values += [
                TABLE[byte % 16] * 2.0 ** (scale - 127),
                TABLE[byte // 16] * 2.0 ** (scale - 127),
            ]
    return torch.tensor(values, dtype=torch.float64).float()


def best_squared_error(values: list[float], scale: int) -> float:
    """Return the least squared error that any quantized values reach at `scale`."""
    unit = 2.0 ** (scale - 127)
    return sum(min((value - code * unit) ** 2 for code in TABLE) for value in values)


def test_dequantise_agrees_with_the_scalar_table_on_every_byte_and_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).reshape(-1, 16)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(
        16
    )  # 255 means NaN in MX, never written

    assert torch.equal(mxfp4.dequantise(blocks, scales), scalar_dequantise(blocks, scales))


def test_dequantise_agrees_with_transformers() -> None:
    reference = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 135, (3, 10, 4), generator=generator, dtype=torch.uint8)

    expected = reference(blocks, scales, dtype=torch.float32).transpose(
        1, 2
    )  # transformers has [E, in, out]

    assert torch.equal(mxfp4.dequantise(blocks, scales), expected)


def test_quantise_returns_representable_weights_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (64, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 129, (64,), generator=generator, dtype=torch.uint8)
    weight = mxfp4.dequantise(blocks, scales)

    assert torch.equal(mxfp4.dequantise(*mxfp4.quantise(weight)), weight)


@pytest.mark.parametrize("spread", [1e-30, 1e-3, 0.02, 1.0, 3.0])
def test_quantise_reaches_the_least_error_of_the_two_candidate_scales(spread: float) -> None:
    weight = spread * torch.randn(40, 32, generator=torch.Generator().manual_seed(2))

    blocks, scales = mxfp4.quantise(weight)

    decoded = mxfp4.dequantise(blocks, scales)
    rows = zip(
        weight.double().tolist(), decoded.double().tolist(), scales[:, 0].tolist(), strict=True
    )
    for row, result, scale in rows:
        tight = 127 + math.floor(math.log2(max(abs(value) for value in row))) - 2
        least = min(best_squared_error(row, tight), best_squared_error(row, tight + 1))
        error = sum((a - b) ** 2 for a, b in zip(row, result, strict=True))
        assert scale in (tight, tight + 1)
        assert error == pytest.approx(least, rel=1e-5)


def test_quantise_rounds_ties_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    evens = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    row = torch.tensor([6.0, *ties, *(-tie for tie in ties), *([0.5] * 17)])

    decoded = mxfp4.dequantise(*mxfp4.quantise(row))

    assert decoded.tolist() == [6.0, *evens, *(-even for even in evens), *([0.5] * 17)]


def test_quantise_keeps_small_scales_normal() -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 2.0**-130
    weight[2] = 12.0

    _, scales = mxfp4.quantise(weight)

    assert scales.flatten().tolist() == [1, 1, 128]


def test_fake_quantise_is_quantise_then_dequantise() -> None:
    weight = torch.randn(8, 6, 64, generator=torch.Generator().manual_seed(3))

    assert torch.equal(mxfp4.fake_quantise(weight), mxfp4.dequantise(*mxfp4.quantise(weight)))


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 33), torch.full((32,), torch.nan), torch.full((32,), torch.inf)]
)
def test_quantise_rejects_unsupported_weights(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="MXFP4 weight: got"):
        mxfp4.quantise(weight)


def test_dequantise_rejects_shapes_and_types_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="expected \\[2, 3, 16\\]"):
        mxfp4.dequantise(
            torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
        )
    with pytest.raises(ValueError, match="expected uint8"):
        mxfp4.dequantise(torch.zeros(2, 4, 16), torch.zeros(2, 4))
