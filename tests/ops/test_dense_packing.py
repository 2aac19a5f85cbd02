"""Packed dense weights have every value at the place that kernels read, and can be unpacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import decoded, quantised
from specbuild.plugins_cuda.linear.packing import pack_rows, packed_shape, unpack_rows
from specbuild.plugins_cuda.linear.storage import FP8, MXFP4, Storage, weight_tiles
from specbuild.plugins_cuda.rms_qkv_rope.packing import (
    join_qkv,
    pack_qkv,
    unpack_qkv,
    unpack_qkv_bias,
)
from specbuild.plugins_cuda.rms_swiglu.packing import pack_gate_up, unpack_gate_up
from specbuild.runtime.errors import SpecbuildError


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def lane_values(packed: torch.Tensor, tile: int, block: int, half: int, lane: int) -> torch.Tensor:
    """Return the values that a lane loads from half a tile."""
    start = half * 256 + lane * 8
    return packed[tile, block, start : start + 8]


def test_every_lane_loads_its_row_and_columns() -> None:
    weight = random(48, 96)
    packed = pack_rows(weight)
    assert packed.shape == (3, 3, 512)
    for tile in range(3):
        for block in range(3):
            for half in range(2):
                for lane in range(32):
                    row, column = 16 * tile + 8 * half + lane // 4, 32 * block + 8 * (lane % 4)
                    expected = weight[row, column : column + 8]
                    assert torch.equal(lane_values(packed, tile, block, half, lane), expected)


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (80, 224), (192, 96)])
def test_rows_are_unpacked(rows: int, columns: int) -> None:
    weight = random(rows, columns)
    assert torch.equal(unpack_rows(pack_rows(weight)), weight)


@pytest.mark.parametrize(("rows", "columns"), [(24, 32), (16, 48)])
def test_rejects_sizes_that_do_not_fill_tiles(rows: int, columns: int) -> None:
    with pytest.raises(SpecbuildError, match=f"{rows} x {columns} cannot be packed"):
        packed_shape(rows, columns)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64])
def test_the_two_values_of_a_rotation_are_in_one_tile(head_dim: int) -> None:
    parts = [random(heads * head_dim, 32) for heads in (3, 2, 2)]
    joined = torch.cat(parts)
    packed = pack_qkv(*parts, head_dim=head_dim)
    for tile in range(len(packed)):
        head, first = divmod(16 * tile, head_dim)
        for g in range(8):
            row = head * head_dim + first // 2 + g
            for half, expected in enumerate((row, row + head_dim // 2)):
                values = [lane_values(packed, tile, 0, half, 4 * g + t) for t in range(4)]
                assert torch.equal(torch.cat(values), joined[expected])
    assert torch.equal(unpack_qkv(packed, head_dim), joined)


def test_biases_are_permuted_like_their_rows() -> None:
    biases = [random(heads * 32) for heads in (4, 1, 1)]
    columns = [bias.unsqueeze(1).repeat(1, 32) for bias in biases]
    packed = join_qkv(*biases, head_dim=32)
    assert torch.equal(unpack_rows(pack_qkv(*columns, head_dim=32))[:, 0], packed)
    assert torch.equal(unpack_qkv_bias(packed, 32), torch.cat(biases))


def test_rejects_heads_that_do_not_fill_tiles() -> None:
    with pytest.raises(SpecbuildError, match="heads of width 24"):
        join_qkv(random(48), random(24), random(24), head_dim=24)


def test_gate_and_up_rows_share_a_tile() -> None:
    gate, up = random(40, 64), random(40, 64)
    packed = pack_gate_up(gate, up)
    for tile in range(5):
        for g in range(8):
            for half, part in enumerate((gate, up)):
                values = [lane_values(packed, tile, 1, half, 4 * g + t) for t in range(4)]
                assert torch.equal(torch.cat(values), part[8 * tile + g, 32:])
    unpacked = unpack_gate_up(packed)
    assert torch.equal(unpacked[0], gate)
    assert torch.equal(unpacked[1], up)


def test_rejects_an_mlp_that_does_not_fill_tiles() -> None:
    with pytest.raises(SpecbuildError, match="an MLP of 12 rows"):
        pack_gate_up(random(12, 32), random(12, 32))


def mx_values(codes: list[int], storage: Storage) -> np.ndarray:
    """Return the values of elements with a scale of one, by the OCP Microscaling specification."""
    bits, bias, mantissa = {MXFP4: (4, 1, 1), FP8: (8, 7, 3)}[storage]
    code = np.array(codes)
    sign, rest = code >> (bits - 1), code & (1 << (bits - 1)) - 1
    exponent, fraction = rest >> mantissa, (rest & (1 << mantissa) - 1) / (1 << mantissa)
    normal = 2.0 ** (exponent - bias) * (1 + fraction)
    return (1 - 2 * sign) * np.where(exponent > 0, normal, 2.0 ** (1 - bias) * fraction)


CODED = pytest.mark.parametrize("storage", [MXFP4, FP8], ids=lambda storage: storage.name)
# All elements but fp8's two NaNs.
ELEMENTS = {MXFP4: range(16), FP8: [code for code in range(256) if code & 127 != 127]}


@CODED
@settings(deadline=None)
@given(seed=st.integers(0, 1 << 20), blocks=st.integers(1, 5))
def test_quantizing_representable_values_is_exact(storage: Storage, seed: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    values = mx_values(list(ELEMENTS[storage]), storage)
    drawn = rng.choice(values, (32, blocks, 32))
    drawn[..., rng.integers(32)] = values.max()
    drawn *= 2.0 ** rng.integers(-40, 1, (32, blocks, 1))
    weight = torch.from_numpy(drawn.reshape(32, -1)).bfloat16()
    coded = quantised(pack_rows(weight), storage)
    assert tuple(coded.shape) == (2, storage.units(blocks), storage.elements)
    assert torch.equal(unpack_rows(decoded(coded, 32 * blocks)), weight)


@CODED
@given(seed=st.integers(0, 1 << 20))
def test_other_values_are_rounded_to_the_nearest_element(storage: Storage, seed: int) -> None:
    """The error is at most half a step; of the largest element if the scale is one larger."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((16, 64)) * 2.0 ** rng.integers(-12, 1, (16, 1))
    drawn = torch.from_numpy(weight).bfloat16()
    dequantized = unpack_rows(decoded(quantised(pack_rows(drawn), storage), 64)).double().numpy()
    blocks = drawn.double().numpy().reshape(16, 2, 32)
    grid = np.unique(mx_values(list(ELEMENTS[storage]), storage))
    exponent = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True)))
    scale = 2.0 ** (exponent - np.floor(np.log2(grid.max())))
    beyond = 2 * grid[-1] - (grid[-1] + grid[-2]) / 2
    scale = np.where(np.abs(blocks).max(-1, keepdims=True) > scale * beyond, 2 * scale, scale)
    distance = np.abs(blocks[..., None] / scale[..., None] - grid)
    error = np.abs(dequantized.reshape(blocks.shape) - blocks) / scale
    np.testing.assert_array_equal(error, distance.min(-1))


@CODED
def test_rejects_a_weight_of_another_width(storage: Storage) -> None:
    info = TensorInfo((4, 3, storage.elements), "uint8")
    assert weight_tiles(info, 160) == (4, 5, storage)
    with pytest.raises(SpecbuildError, match="expected those of rows of 256 values"):
        weight_tiles(info, 256)
