"""The layout of packed expert weights for the tensor cores: MXFP4's codes and scales, or bf16.

A *tile* is 16 rows of an ``mma.m16n8k16`` and all of K, stored as *stages* of up to 15 *steps* of
16 rows × 32 columns. A warp streams a tile stage by stage. A stage of n steps is

    256 bytes of scales:      [mma row (16)][16] u8: the scale of the row at each step, then zeros
    n × 256 bytes of codes:   [step][lane 4·g + t][half h] u32: the 8 codes of mma row g + 8·h at
                              k = 8·t … 8·t + 7 of the step, bits in the order of ``E2M1_WORDS``

Scales come first, so one copy loads a stage, or its first steps with their scales.

- gate/up, tile j of I/8: mma row g is gate row 8·j + g, mma row g + 8 its up row; step b is block b
  of 32 columns. The clamped SwiGLU of a row then needs the sums of one lane only.
- down, tile j of H/8: mma row g is output row 8·j + g at block 2·s of step s, mma row g + 8 the
  same row at block 2·s + 1 (zeros with scale 1 past an odd last block). Columns 4 to 7 of the mma
  hold the activations of the odd block, so a tile has 4 tokens at once. Tiles of 8 rows divide 2880
  rows evenly between 132 multiprocessors; tiles of 16 would not.

All sizes are multiples of 256 bytes, as bulk copies require.

In bf16, rows and steps are the same, without scales. A step is a tile of ``linear/packing.py``, 512
values: [half h][lane 4·g + t][8]. A stage has four of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import TILE_VALUES, pack_rows, unpack_rows
from specbuild.plugins_cuda.moe.e2m1 import E2M1_WORDS
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch

BLOCK = 32
STAGE_STEPS = 15
BF16_STAGE_STEPS = 4
STEP_BYTES = 256
TILE_OUTPUTS = 8
# The decoder multiplies by 2^(scale − 1) in bf16, whose largest power of two is 2^127.
LARGEST_SCALE = 128


def stage_count(steps: int) -> int:
    """Return the stages of a tile of this many steps."""
    return -(-steps // STAGE_STEPS)


def tile_bytes(steps: int) -> int:
    """Return the bytes of a tile of this many steps."""
    return STEP_BYTES * (steps + stage_count(steps))


def gate_up_stages(hidden: int, *, bf16: bool) -> int:
    """Return the stages of a tile of gate/up."""
    return -(-gate_up_steps(hidden) // (BF16_STAGE_STEPS if bf16 else STAGE_STEPS))


def in_bf16(dtype: str) -> bool:
    """Return whether a packed weight of this type is bf16, else MXFP4."""
    return dtype == "bfloat16"


def gate_up_steps(hidden: int) -> int:
    """Return the steps of a gate/up tile: one per block."""
    return hidden // BLOCK


def down_steps(inner: int) -> int:
    """Return the steps of a down tile: one per two blocks."""
    return -(-inner // (2 * BLOCK))


def pack_gate_up(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack blocks u8 [E, 2·I, H/32, 16] and scales u8 [E, 2·I, H/32] as u8 [E, I/8, tile bytes].

    Gate and up rows alternate, as in the checkpoint. Needs memory for the result and about three
    experts. Raises SpecbuildError for unsupported sizes or scales.
    """
    import torch

    experts, rows, width = _check("gate/up", blocks, scales, row_multiple=2 * TILE_OUTPUTS)
    tiles = rows // (2 * TILE_OUTPUTS)
    packed = torch.zeros(experts, tiles, tile_bytes(width), dtype=torch.uint8)
    for expert in range(experts):
        words = E2M1_WORDS.placed(blocks[expert]).view(tiles, TILE_OUTPUTS, 2, width, 4)
        rates = scales[expert].reshape(tiles, TILE_OUTPUTS, 2, width)
        _write(packed[expert], words.permute(0, 3, 1, 4, 2), rates.permute(0, 2, 1, 3))
    return packed


def unpack_gate_up(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks u8 [E, 2·I, H/32, 16] and scales [E, 2·I, H/32], as before `pack_gate_up`."""
    words, rates = _read(packed)
    experts, tiles, width = words.shape[:3]
    rows = 2 * TILE_OUTPUTS * tiles
    codes = E2M1_WORDS.natural(words.permute(0, 1, 3, 5, 2, 4)).view(experts, rows, width, 16)
    return codes, rates.permute(0, 1, 3, 2, 4).reshape(experts, rows, width)


def pack_gate_up_values(*weights: torch.Tensor) -> torch.Tensor:
    """Pack values [E, H, 2·I], gate and up alternating, as [E, I/8, 16·H]; concatenate ``weights``.

    Raises SpecbuildError for unsupported sizes.
    """
    import torch

    _, width, rows = weights[0].shape
    _check_rows("gate/up", rows, 2 * TILE_OUTPUTS)
    experts = [expert for weight in weights for expert in weight]
    shape = (len(experts), rows // (2 * TILE_OUTPUTS), gate_up_steps(width) * TILE_VALUES)
    packed = torch.empty(shape, dtype=weights[0].dtype, device=weights[0].device)
    for to, expert in zip(packed, experts, strict=True):
        halves = expert.T.reshape(-1, TILE_OUTPUTS, 2, width).transpose(1, 2)
        to.copy_(pack_rows(halves.reshape(rows, width)).flatten(1))
    return packed


def unpack_gate_up_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the values before :func:`pack_gate_up_values`."""
    experts, tiles, values = packed.shape
    rows = unpack_rows(packed.reshape(experts * tiles, -1, TILE_VALUES))
    halves = rows.view(experts, tiles, 2, TILE_OUTPUTS, values // (2 * TILE_OUTPUTS))
    return halves.transpose(2, 3).flatten(1, 3).transpose(1, 2)


def pack_gate_up_bias(bias: torch.Tensor) -> torch.Tensor:
    """Pack a bias [E, 2·I], gate and up alternating, by tiles: 8 gates, then their 8 ups."""
    return _swap_pairs(bias, TILE_OUTPUTS, 2)


def unpack_gate_up_bias(packed: torch.Tensor) -> torch.Tensor:
    """Return the bias before :func:`pack_gate_up_bias`."""
    return _swap_pairs(packed, 2, TILE_OUTPUTS)


def pack_down(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack blocks u8 [E, H, I/32, 16] and scales u8 [E, H, I/32] as u8 [E, H/8, tile bytes].

    Needs memory for the result and about three experts. Raises SpecbuildError for unsupported sizes
    or scales.
    """
    import torch
    from torch.nn import functional as F

    experts, rows, width = _check("down", blocks, scales, row_multiple=TILE_OUTPUTS)
    steps, tiles, odd = -(-width // 2), rows // TILE_OUTPUTS, width % 2
    packed = torch.zeros(experts, tiles, tile_bytes(steps), dtype=torch.uint8)
    for expert in range(experts):
        padded = F.pad(blocks[expert], (0, 0, 0, odd))
        words = E2M1_WORDS.placed(padded).view(tiles, TILE_OUTPUTS, steps, 2, 4)
        rates = F.pad(scales[expert], (0, odd), value=1).view(tiles, TILE_OUTPUTS, steps, 2)
        _write(packed[expert], words.permute(0, 2, 1, 4, 3), rates.permute(0, 3, 1, 2))
    return packed


def unpack_down(packed: torch.Tensor, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks u8 [E, H, I/32, 16] and scales u8 [E, H, I/32], as before `pack_down`."""
    words, rates = _read(packed)
    experts, tiles, steps = words.shape[:3]
    rows, width = TILE_OUTPUTS * tiles, inner // BLOCK
    codes = E2M1_WORDS.natural(words.permute(0, 1, 3, 2, 5, 4)).view(experts, rows, 2 * steps, 16)
    natural = rates.permute(0, 1, 3, 4, 2).reshape(experts, rows, 2 * steps)
    return codes[:, :, :width].contiguous(), natural[:, :, :width].contiguous()


def pack_down_values(*weights: torch.Tensor) -> torch.Tensor:
    """Pack values [E, I, H] as [E, H/8, 512 per two blocks of I], like :func:`pack_gate_up_values`.

    Raises SpecbuildError for unsupported sizes.
    """
    import torch
    from torch.nn import functional as F

    _, width, rows = weights[0].shape
    _check_rows("down", rows, TILE_OUTPUTS)
    steps, tiles = down_steps(width), rows // TILE_OUTPUTS
    experts = [expert for weight in weights for expert in weight]
    shape = (len(experts), tiles, steps * TILE_VALUES)
    packed = torch.empty(shape, dtype=weights[0].dtype, device=weights[0].device)
    for to, expert in zip(packed, experts, strict=True):
        padded = F.pad(expert.T, (0, 2 * BLOCK * steps - width))
        blocks = padded.reshape(tiles, TILE_OUTPUTS, steps, 2, BLOCK).permute(0, 3, 1, 2, 4)
        to.copy_(pack_rows(blocks.reshape(2 * rows, steps * BLOCK)).flatten(1))
    return packed


def unpack_down_values(packed: torch.Tensor, inner: int) -> torch.Tensor:
    """Return the values before :func:`pack_down_values`."""
    experts, tiles, values = packed.shape
    steps = values // TILE_VALUES
    rows = unpack_rows(packed.reshape(experts * tiles, steps, TILE_VALUES))
    blocks = rows.view(experts, tiles, 2, TILE_OUTPUTS, steps, BLOCK).permute(0, 1, 3, 4, 2, 5)
    return blocks.reshape(experts, tiles * TILE_OUTPUTS, -1)[..., :inner].transpose(1, 2)


def _check_rows(name: str, rows: int, multiple: int) -> None:
    if rows % multiple:
        raise SpecbuildError(
            f"The {name} weight has {rows} rows, expected a multiple of {multiple}: "
            "the CUDA kernels cannot run this model, build for the CPU."
        )


def _check(
    name: str, blocks: torch.Tensor, scales: torch.Tensor, *, row_multiple: int
) -> tuple[int, int, int]:
    experts, rows, width, codes = blocks.shape
    if codes != BLOCK // 2 or tuple(scales.shape) != (experts, rows, width):
        raise SpecbuildError(
            f"The MXFP4 {name} weight has blocks {tuple(blocks.shape)} and scales "
            f"{tuple(scales.shape)}, expected [experts, rows, columns/32, 16] and the same without "
            "the last axis: check the checkpoint's tensors."
        )
    _check_rows(name, rows, row_multiple)
    largest = int(scales.max())
    if largest > LARGEST_SCALE:
        raise SpecbuildError(
            f"The MXFP4 {name} weight has a scale of 2^{largest - 127}, expected at most "
            f"2^{LARGEST_SCALE - 127}: check the checkpoint, no trained weight is that large."
        )
    return experts, rows, width


def _stages(steps: int) -> list[tuple[int, int, int]]:
    """Return the first step, the number of steps and the first byte of every stage of a tile."""
    starts = range(0, steps, STAGE_STEPS)
    size = STEP_BYTES * (STAGE_STEPS + 1)
    return [(s, min(STAGE_STEPS, steps - s), i * size) for i, s in enumerate(starts)]


def _write(packed: torch.Tensor, words: torch.Tensor, rates: torch.Tensor) -> None:
    """Fill u8 [tiles, bytes] from int32 [tiles, steps, g, t, h] and u8 [tiles, h, g, steps]."""
    import torch

    as_words = packed.view(torch.int32)
    for step, count, start in _stages(words.shape[1]):
        codes_at = start + STEP_BYTES
        stage_scales = packed[:, start:codes_at].unflatten(1, (2, 8, 16))
        stage_scales[..., :count].copy_(rates[..., step : step + count])
        codes = as_words[:, codes_at // 4 : (codes_at + count * STEP_BYTES) // 4]
        codes.unflatten(1, (count, 8, 4, 2)).copy_(words[:, step : step + count])


def _read(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 [E, tiles, steps, g, t, h] and u8 [E, tiles, h, g, steps] of packed tiles."""
    import torch

    rows = packed.shape[2] // STEP_BYTES
    steps = rows - -(-rows // (STAGE_STEPS + 1))
    words, rates = [], []
    for _, count, start in _stages(steps):
        codes_at = start + STEP_BYTES
        rates.append(packed[..., start:codes_at].unflatten(2, (2, 8, 16))[..., :count])
        codes = packed[..., codes_at : codes_at + count * STEP_BYTES].contiguous()
        words.append(codes.view(torch.int32).unflatten(2, (count, 8, 4, 2)))
    return torch.cat(words, dim=2), torch.cat(rates, dim=4)


def _swap_pairs(bias: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    experts, rows = bias.shape
    return bias.reshape(experts, -1, outer, inner).transpose(2, 3).reshape(experts, rows)
