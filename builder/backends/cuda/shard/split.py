"""Splits packed weights into the parts of all ranks: [ranks, *part], equal shapes, in rank order.

Each function also supports the meta device. A packed dense weight has tiles of 16 rows by units of
columns (``plugins_cuda/linear/packing.py``). Splitting rows or columns therefore splits an axis.
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
    """Split the first axis equally: tiles of rows, a bias, sinks."""
    return weight.unflatten(0, (ranks, -1))


def by_columns(packed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split the units of columns of [tiles, units, elements] equally."""
    return packed.unflatten(1, (ranks, -1)).transpose(0, 1)


def by_middle_axis(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split the heads of [latent, heads, width] equally."""
    return weight.unflatten(1, (ranks, -1)).movedim(1, 0)


def by_heads(rows: torch.Tensor, q_heads: int, kv_heads: int, ranks: int) -> torch.Tensor:
    """Split rows of query, key and value heads, in this order, by heads.

    All heads have the same number of rows. With fewer KV heads than ranks, each KV head is copied
    to all ranks with queries of its group.
    """
    heads = rows.unflatten(0, (q_heads + 2 * kv_heads, -1))
    groups = heads.split([q_heads, kv_heads, kv_heads])
    parts = [
        torch.cat([group[_heads_of_rank(len(group), rank, ranks)] for group in groups])
        for rank in range(ranks)
    ]
    return torch.stack(parts).flatten(1, 2)


def first_rows_by_rank(packed: torch.Tensor, rows: int, ranks: int) -> torch.Tensor:
    """Split the first ``rows`` entries equally, and copy the others to every rank."""
    shares, others = packed[:rows].unflatten(0, (ranks, -1)), packed[rows:]
    return torch.cat([shares, others.expand(ranks, *others.shape)], dim=1)


def only_first(bias: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the bias on rank 0 and zeros on the others, so that the sum has it once."""
    return torch.stack([bias, *[torch.zeros_like(bias)] * (ranks - 1)])


def inner_of_rank(inner: int, ranks: int) -> int:
    """Return the inner width of an expert on a rank: its share of blocks of 32, rounded up."""
    return BLOCK * -(-inner // (BLOCK * ranks))


def expert_gate_up(packed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split packed gate/up [E, I/8, tile] by tiles. Padding tiles produce zeros."""
    experts, tiles, size = packed.shape
    padded_tiles = ranks * inner_of_rank(TILE_OUTPUTS * tiles, ranks) // TILE_OUTPUTS
    if padded_tiles > tiles:
        padding = _empty_gate_up(packed).expand(experts, padded_tiles - tiles, size)
        packed = torch.cat([packed, padding], dim=1)
    return packed.unflatten(1, (ranks, -1)).transpose(0, 1)


def expert_gate_up_bias(packed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split their packed biases [E, 2·I], padded with zeros."""
    experts, rows = packed.shape
    padded_rows = 2 * ranks * inner_of_rank(rows // 2, ranks)
    padded = torch.cat([packed, packed.new_zeros(experts, padded_rows - rows)], dim=1)
    return padded.unflatten(1, (ranks, -1)).transpose(0, 1)


def expert_down(packed: torch.Tensor, inner: int, ranks: int) -> torch.Tensor:
    """Split packed down [E, H/8, tile of ``inner`` columns] by blocks of 32 columns, padded."""
    rank_inner = inner_of_rank(inner, ranks)
    is_quantized = packed.dtype == torch.uint8
    if packed.is_meta:
        steps = down_steps(rank_inner)
        step_values = packed.shape[2] // down_steps(inner)
        size = tile_bytes(steps) if is_quantized else step_values * steps
        return packed.new_empty(ranks, *packed.shape[:2], size)
    share = _quantized_down if is_quantized else _down_values
    # Unpack one expert at a time to limit memory.
    return torch.cat([share(expert, inner, rank_inner, ranks) for expert in packed.split(1)], dim=1)


def _heads_of_rank(heads: int, rank: int, ranks: int) -> slice:
    """Return the heads of a rank among all heads."""
    first = rank * heads // ranks
    return slice(first, first + (heads_of_rank(heads, ranks) if heads else 0))


def _empty_gate_up(packed: torch.Tensor) -> torch.Tensor:
    """Return a tile of zeros, with scales of 1 if the weight is quantized."""
    if packed.dtype != torch.uint8 or packed.is_meta:
        return packed.new_zeros(1, 1, packed.shape[2])
    codes, scales = unpack_gate_up(packed[:1, :1])
    return pack_gate_up(torch.zeros_like(codes), torch.ones_like(scales))


def _quantized_down(expert: torch.Tensor, inner: int, rank_inner: int, ranks: int) -> torch.Tensor:
    codes, scales = unpack_down(expert, inner)
    padding_blocks = (ranks * rank_inner - inner) // BLOCK
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padding_blocks))
    scales = torch.nn.functional.pad(scales, (0, padding_blocks), value=1)
    blocks = rank_inner // BLOCK
    pairs = zip(codes.split(blocks, dim=2), scales.split(blocks, dim=2), strict=True)
    return torch.stack([pack_down(c.contiguous(), s.contiguous()) for c, s in pairs])


def _down_values(expert: torch.Tensor, inner: int, rank_inner: int, ranks: int) -> torch.Tensor:
    values = unpack_down_values(expert, inner)
    padded = torch.nn.functional.pad(values, (0, 0, 0, ranks * rank_inner - inner))
    return torch.stack([pack_down_values(part) for part in padded.split(rank_inner, dim=1)])
