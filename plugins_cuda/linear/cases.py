"""Named cases of Linear, and random weights and rows for the cases of other dense ops."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.block_scaled import quantised
from specbuild.plugins_cuda.linear.codec import (
    BLOCK_MINIMUM,
    BLOCK_SCALE,
    MINIMUM,
    SCALE,
    ZERO,
    GroupedCodes,
    GroupPart,
)
from specbuild.plugins_cuda.linear.group_codes import GROUP_STORAGES, codec_of, pack_codes
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, packed_shape
from specbuild.plugins_cuda.linear.storage import (
    BF16,
    FP8,
    FP8_BLOCK,
    FP8_ROWS,
    INT4_BF16,
    INT4_G32_BF16,
    INT4_SYMMETRIC,
    K_MIXED,
    LOAD_BYTES,
    MIXED,
    MXFP4,
    NVFP4,
    Q8_BF16,
    Storage,
)

# Random values of a large weight; the other tiles repeat them with different scales.
_DRAWN_VALUES = 1 << 24


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Return normal fp32 values."""
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def draw_packed(
    rng: np.random.Generator, rows: int, columns: int, storage: Storage = BF16
) -> np.ndarray:
    """Return a packed weight whose products with normalized rows are about 1."""
    tiles, blocks, values = packed_shape(rows, columns)
    distinct = min(tiles, max(1, _DRAWN_VALUES // (blocks * values)))
    if storage in GROUP_STORAGES:
        coded = draw_codes(rng, distinct * TILE_ROWS, columns, storage)
        return coded[np.arange(tiles) % distinct]
    drawn = draw(rng, distinct, blocks, values, scale=columns**-0.5)
    if storage.scaled:
        return _coded(rng, drawn, tiles, storage)
    if distinct == tiles:
        return drawn
    scales = rng.uniform(0.5, 1.0, (tiles, 1, 1)).astype(np.float32)
    return drawn[np.arange(tiles) % distinct] * scales


def draw_codes(rng: np.random.Generator, rows: int, columns: int, storage: Storage) -> np.ndarray:
    """Return a packed weight of random quantized values, with scales for such products."""
    return pack_codes(draw_groups(rng, rows, columns, storage), storage).numpy()


def draw_groups(
    rng: np.random.Generator, rows: int, columns: int, storage: Storage
) -> GroupedCodes:
    """Return random quantized values of a weight, and the numbers of its groups in ``storage``."""
    import torch

    codec = codec_of(storage)
    count = 1 << codec.bits
    if storage in (FP8_BLOCK, FP8_ROWS):
        drawn = torch.from_numpy(rng.integers(0, 127, (rows, columns), np.uint8))
        drawn |= torch.from_numpy(rng.integers(0, 2, (rows, columns), np.uint8)) << 7
        codes, middle, size = drawn.view(torch.float8_e4m3fn), 0, 100.0
    else:
        signed = storage in (K_MIXED, MIXED) or (
            MINIMUM not in codec.parts and ZERO not in codec.parts
        )
        middle = count // 2 if signed else 0
        values = np.array(codec.table) if codec.table else np.arange(count) - middle
        codes = torch.from_numpy(values[rng.integers(0, count, (rows, columns))])
        size = values.std()
    few = {SCALE: 64, MINIMUM: 64}
    products = BLOCK_SCALE in codec.parts
    parts: dict[str, GroupPart] = {}
    for name, part in codec.parts.items():
        shape = (rows, -(-columns // part))
        if name == ZERO:
            made = rng.integers(0, count, shape)
        elif storage is NVFP4:
            made = _nvfp4_numbers(rng, name, shape, columns**-0.5 / size / 16)
        elif products and name in few:
            low = 0 if MINIMUM in codec.parts else -few[name]
            made = rng.integers(low, few[name], shape)
        else:
            # Minima centre unsigned values; those of signed values are small.
            sign = -1.0 if storage is MIXED else -count / 2.0
            sign = sign if name in (MINIMUM, BLOCK_MINIMUM) else 1.0
            rate = columns**-0.5 / size / (32 if products else 1)
            made = (sign * rng.uniform(0.5, 1.0, shape) * rate).astype(np.float16)
            if storage in (INT4_SYMMETRIC, INT4_BF16, INT4_G32_BF16, Q8_BF16):
                made = torch.from_numpy(made).bfloat16().float().numpy()
        if storage is FP8_BLOCK:
            made = np.repeat(made[::8].astype(np.float32) * np.float32(1.1), 8, axis=0)[:rows]
        numbers = torch.from_numpy(made)
        parts[name] = GroupPart(numbers if storage is NVFP4 else numbers.float(), part)
    return GroupedCodes(codes, parts)


def _nvfp4_numbers(
    rng: np.random.Generator, name: str, shape: tuple[int, int], rate: float
) -> np.ndarray:
    """Return e4m3 scales from 0 to 64, or fp32 numbers of eight rows each, of about ``rate``.

    The root mean square of the scales is about 16, because most of them are small.
    """
    import torch

    if name == SCALE:
        codes = rng.integers(0, 105, shape, np.uint8)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    divisors = (rng.uniform(1.0, 2.0, -(-shape[0] // 8)) / rate).astype(np.float32)
    of_rows = 1 / np.repeat(divisors, 8).astype(np.float64)[: shape[0], None]
    return np.repeat(of_rows, shape[1], axis=1)


def _coded(rng: np.random.Generator, drawn: np.ndarray, tiles: int, storage: Storage) -> np.ndarray:
    """Quantize ``drawn`` and repeat it to ``tiles`` tiles, each multiplied by a half or not."""
    import torch

    coded = quantised(torch.from_numpy(drawn).bfloat16(), storage).numpy()
    repeated = coded[np.arange(tiles) % len(coded)]
    scales = repeated[..., storage.loads * LOAD_BYTES :]
    scales -= rng.integers(0, 2, (tiles, 1, 1), np.uint8)
    return repeated


def linear(
    tokens: int,
    rows: int,
    columns: int,
    *,
    bias: bool = False,
    residual: bool = False,
    scale: float = 1.0,
    storage: Storage = BF16,
    prefix: str = "",
) -> Case:
    """``tokens`` rows of ``columns`` values times a weight of ``rows`` rows."""

    def make(rng: np.random.Generator) -> Arrays:
        return (
            draw(rng, tokens, columns),
            draw_packed(rng, rows, columns, storage),
            draw(rng, rows) if bias else None,
            draw(rng, tokens, rows) if residual else None,
        )

    extras = ", bias" * bias + ", residual" * residual + f", {storage.name}" * storage.scaled
    extras += f", times {scale:g}" * (scale != 1)
    name = f"{prefix}{tokens} rows, {columns} to {rows}{extras}"
    # A product of up to 8 is rounded to bf16 before a residual may cancel it.
    bound = 2**-5 if residual else 1e-2
    return Case(name, make, {"scale": scale}, atol=1e-4, kernel_atol=bound)


CASES: tuple[Case, ...] = (
    linear(1, 64, 96, bias=True, residual=True),
    linear(3, 80, 224, residual=True),
    linear(8, 48, 32, bias=True),
    linear(5, 16, 160),
    linear(3, 80, 224, residual=True, scale=0.22),
)

_CODED = (MXFP4, FP8)

KERNEL_CASES: tuple[Case, ...] = (
    # Wide tokens: rows in shared memory, and directly from L2, two blocks per step.
    linear(2, 16, 9216, residual=True, storage=MXFP4),
    linear(8, 16, 9216, residual=True, storage=MXFP4),
    linear(3, 64, 9248, bias=True, storage=FP8),
    # An odd number of blocks: the last unit is half empty.
    *(linear(3, 80, 224, bias=True, residual=True, storage=form) for form in _CODED),
    linear(11, 112, 544, bias=True, residual=True),
    linear(21, 144, 96, residual=True),
    linear(40, 80, 1056, bias=True),
    linear(75, 64, 64, residual=True),
    linear(21, 80, 1056, residual=True, scale=0.22),
    # Panels: slices of two blocks and of four, with a last panel that may be half empty; an
    # incomplete last group of 8 rows; more tiles than warps, and tiles for some of them.
    linear(64, 48, 1024, bias=True),
    linear(33, 208, 1280, bias=True, residual=True),
    linear(40, 48, 1280, residual=True, scale=0.22),
    linear(70, 144, 1888, residual=True),
    # Panels with quantized weights: a last panel that is half empty, and slices of two panels.
    linear(40, 80, 1888, bias=True, residual=True, storage=MXFP4),
    linear(33, 48, 1280, storage=FP8),
    # More panels than fit in shared memory, twice: those of the first tiles are read again.
    linear(120, 144, 2880, residual=True),
    linear(2, 192, 192, bias=True, residual=True),
    linear(1, 80, 1216, bias=True, residual=True),
    *(linear(t, 2880, 4096, bias=True, residual=True, prefix="gpu: ") for t in (1, 4, 8, 40, 64)),
    linear(1, 2880, 17280, residual=True, prefix="gpu: "),
    linear(8, 2880, 17280, residual=True, prefix="gpu: "),
    linear(4, 2880, 8640, prefix="gpu: "),
    *(linear(t, 2880, 4096, bias=True, residual=True, prefix="gpu: ") for t in (200, 256)),
    *(
        linear(t, 2880, columns, residual=True, prefix="gpu: ")
        for t in (64, 128)
        for columns in (8640, 17280)
    ),
    *(
        linear(t, 2880, columns, residual=columns != 8640, storage=form, prefix="gpu: ")
        for form in _CODED
        for t, columns in ((1, 4096), (5, 17280), (16, 8640), (64, 4096), (80, 17280), (200, 17280))
    ),
)
