"""Packed weights as the parts of all ranks: [ranks, *part], equal shapes, in rank order.

Each function also works on the meta device. A packed dense weight is tiles of 16 rows by units of
columns (``plugins_cuda/linear/packing.py``), so a share of rows or columns is a share of an axis.
"""

from __future__ import annotations

import torch

from specbuild.plugins_cuda.rms_moe.packing import (
    BLOCK,
    TILE_OUTPUTS,
    down_steps,
    pack_down,
    pack_down_values,
    pack_gate_up,
    tile_bytes,
    unpack_down,
    unpack_down_values,
    unpack_gate_up,
)
from specbuild.runtime.engine_dir.ranks import heads_of_rank


def by_rows(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """Equal shares of the first axis: tiles of rows, a bias, sinks."""
    return weight.unflatten(0, (ranks, -1))


def by_columns(packed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Equal shares of the units of columns of [tiles, units, elements]."""
    return packed.unflatten(1, (ranks, -1)).transpose(0, 1)


def by_middle_axis(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """Equal shares of the heads of [latent, heads, width]."""
    return weight.unflatten(1, (ranks, -1)).movedim(1, 0)


def by_heads(rows: torch.Tensor, q_heads: int, kv_heads: int, ranks: int) -> torch.Tensor:
    """Rows of query, key and value heads, in this order, with the heads of each rank.

    Every head has as many entries of the first axis. A key and value head of fewer than ``ranks``
    is held by all ranks that have queries of its group.
    """
    heads = rows.unflatten(0, (q_heads + 2 * kv_heads, -1))
    groups = heads.split([q_heads, kv_heads, kv_heads])
    parts = [
        torch.cat([group[_own_heads(len(group), rank, ranks)] for group in groups])
        for rank in range(ranks)
    ]
    return torch.stack(parts).flatten(1, 2)


def first_rows_by_rank(packed: torch.Tensor, rows: int, ranks: int) -> torch.Tensor:
    """Equal shares of the first ``rows`` entries, the others whole on every rank."""
    shares, others = packed[:rows].unflatten(0, (ranks, -1)), packed[rows:]
    return torch.cat([shares, others.expand(ranks, *others.shape)], dim=1)


def only_first(bias: torch.Tensor, ranks: int) -> torch.Tensor:
    """All of it on rank 0, zeros on the others: the sum over ranks has it once."""
    return torch.stack([bias, *[torch.zeros_like(bias)] * (ranks - 1)])


def inner_of_rank(inner: int, ranks: int) -> int:
    """The inner width of an expert on a rank: its share of blocks of 32, rounded up."""
    return BLOCK * -(-inner // (BLOCK * ranks))


def expert_gate_up(packed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Packed gate/up [E, I/8, tile] by tiles; tiles behind the last give zeros."""
    experts, tiles, size = packed.shape
    whole = ranks * inner_of_rank(TILE_OUTPUTS * tiles, ranks) // TILE_OUTPUTS
    if whole > tiles:
        padding = _empty_gate_up(packed).expand(experts, whole - tiles, size)
        packed = torch.cat([packed, padding], dim=1)
    return packed.unflatten(1, (ranks, -1)).transpose(0, 1)


def expert_gate_up_bias(packed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Their packed biases [E, 2·I]; zeros behind the last."""
    experts, rows = packed.shape
    whole = 2 * ranks * inner_of_rank(rows // 2, ranks)
    padded = torch.cat([packed, packed.new_zeros(experts, whole - rows)], dim=1)
    return padded.unflatten(1, (ranks, -1)).transpose(0, 1)


def expert_down(packed: torch.Tensor, inner: int, ranks: int) -> torch.Tensor:
    """Packed down [E, H/8, tile of ``inner`` columns] by blocks of 32 columns; zeros behind."""
    own = inner_of_rank(inner, ranks)
    coded = packed.dtype == torch.uint8
    if packed.is_meta:
        steps = down_steps(own)
        step_values = packed.shape[2] // down_steps(inner)
        size = tile_bytes(steps) if coded else step_values * steps
        return packed.new_empty(ranks, *packed.shape[:2], size)
    share = _coded_down if coded else _down_values
    # One expert at a time is unpacked.
    return torch.cat([share(expert, inner, own, ranks) for expert in packed.split(1)], dim=1)


def _own_heads(heads: int, rank: int, ranks: int) -> slice:
    """The heads of a rank among all."""
    first = rank * heads // ranks
    return slice(first, first + (heads_of_rank(heads, ranks) if heads else 0))


def _empty_gate_up(packed: torch.Tensor) -> torch.Tensor:
    """A tile of zeros, whose scales are 1 where it has some."""
    if packed.dtype != torch.uint8 or packed.is_meta:
        return packed.new_zeros(1, 1, packed.shape[2])
    codes, scales = unpack_gate_up(packed[:1, :1])
    return pack_gate_up(torch.zeros_like(codes), torch.ones_like(scales))


def _coded_down(expert: torch.Tensor, inner: int, own: int, ranks: int) -> torch.Tensor:
    codes, scales = unpack_down(expert, inner)
    lacking = (ranks * own - inner) // BLOCK
    codes = torch.nn.functional.pad(codes, (0, 0, 0, lacking))
    scales = torch.nn.functional.pad(scales, (0, lacking), value=1)
    blocks = own // BLOCK
    pairs = zip(codes.split(blocks, dim=2), scales.split(blocks, dim=2), strict=True)
    return torch.stack([pack_down(c.contiguous(), s.contiguous()) for c, s in pairs])


def _down_values(expert: torch.Tensor, inner: int, own: int, ranks: int) -> torch.Tensor:
    values = unpack_down_values(expert, inner)
    padded = torch.nn.functional.pad(values, (0, 0, 0, ranks * own - inner))
    return torch.stack([pack_down_values(part) for part in padded.split(own, dim=1)])
