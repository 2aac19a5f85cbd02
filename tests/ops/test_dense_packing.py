"""Packed dense weights hold every value where kernels look for it, and can be unpacked."""

from __future__ import annotations

import pytest
import torch

from specbuild.plugins_cuda.linear.packing import pack_rows, packed_shape, unpack_rows
from specbuild.plugins_cuda.rms_qkv_rope.packing import (
    pack_qkv,
    pack_qkv_bias,
    unpack_qkv,
    unpack_qkv_bias,
)
from specbuild.plugins_cuda.rms_swiglu.packing import pack_gate_up, unpack_gate_up
from specbuild.runtime.errors import SpecbuildError


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def lane_values(packed: torch.Tensor, tile: int, block: int, half: int, lane: int) -> torch.Tensor:
    """What a lane loads from half a tile."""
    start = half * 256 + lane * 8
    return packed[tile, block, start : start + 8]


def test_every_lane_has_its_row_and_columns() -> None:
    weight = random(48, 96)
    packed = pack_rows(weight)
    assert packed.shape == (3, 3, 512)
    for tile in range(3):
        for block in range(3):
            for half in range(2):
                for lane in range(32):
                    row, column = 16 * tile + 8 * half + lane // 4, 32 * block + 8 * (lane % 4)
                    wanted = weight[row, column : column + 8]
                    assert torch.equal(lane_values(packed, tile, block, half, lane), wanted)


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (80, 224), (192, 96)])
def test_rows_are_unpacked(rows: int, columns: int) -> None:
    weight = random(rows, columns)
    assert torch.equal(unpack_rows(pack_rows(weight)), weight)


@pytest.mark.parametrize(("rows", "columns"), [(24, 32), (16, 48)])
def test_sizes_that_are_no_tiles_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(SpecbuildError, match=f"{rows} x {columns} cannot be packed"):
        packed_shape(rows, columns)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64])
def test_partners_of_a_rotation_stand_in_one_tile(head_dim: int) -> None:
    parts = [random(heads * head_dim, 32) for heads in (3, 2, 2)]
    joined = torch.cat(parts)
    packed = pack_qkv(*parts, head_dim=head_dim)
    for tile in range(len(packed)):
        head, first = divmod(16 * tile, head_dim)
        for g in range(8):
            row = head * head_dim + first // 2 + g
            for half, wanted in enumerate((row, row + head_dim // 2)):
                values = [lane_values(packed, tile, 0, half, 4 * g + t) for t in range(4)]
                assert torch.equal(torch.cat(values), joined[wanted])
    assert torch.equal(unpack_qkv(packed, head_dim), joined)


def test_biases_follow_their_rows() -> None:
    biases = [random(heads * 32) for heads in (4, 1, 1)]
    columns = [bias.unsqueeze(1).repeat(1, 32) for bias in biases]
    packed = pack_qkv_bias(*biases, head_dim=32)
    assert torch.equal(unpack_rows(pack_qkv(*columns, head_dim=32))[:, 0], packed)
    assert torch.equal(unpack_qkv_bias(packed, 32), torch.cat(biases))


def test_heads_that_are_no_tiles_are_refused() -> None:
    with pytest.raises(SpecbuildError, match="heads of width 24"):
        pack_qkv_bias(random(48), random(24), random(24), head_dim=24)


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


def test_an_mlp_that_is_no_tiles_is_refused() -> None:
    with pytest.raises(SpecbuildError, match="an MLP of 12 rows"):
        pack_gate_up(random(12, 32), random(12, 32))
