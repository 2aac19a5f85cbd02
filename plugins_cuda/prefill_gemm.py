"""Sizes of the prefill GEMM (``_device/prefill_gemm.cuh``): tiles, ring, shared memory, tactics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.storage import BF16, Storage, weight_tiles
from specbuild.runtime.errors import SpecbuildError

THREADS = 384
ROWS_THREADS = 256
ROWS_PER_BLOCK = ROWS_THREADS // 32
TILE_ROWS = 128
PACKED_ROWS = 16
PANEL_COLUMNS, PANEL_ROW_BYTES = 64, 128
COLUMN_STEP, MAX_COLUMNS = 16, 256
# 16-bit values of a token in the staging buffer of a warpgroup. It holds 64 weight rows, or 32
# results of pairs of rows, or nothing if the epilogue stores sums from registers.
ROWS_STAGING, PAIRS_STAGING, UNSTAGED = 72, 40, 0
_MAX_STAGES = 8
_SHARED_BYTES = 227 * 1024
_STATIC_SHARED_BYTES = 2048
# Cycles of a panel: tensor cores need 4 per column, and L2 delivers about 34 bytes per cycle.
_CYCLES_PER_COLUMN = 4
_L2_BYTES_PER_CYCLE = 34


def ceil_div(value: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-value // divisor)


def panel_count(blocks: int) -> int:
    """Return the number of panels of 64 values in K = 32·blocks."""
    return ceil_div(blocks, 2)


def panel_bytes(blocks: int, rows: int) -> int:
    """Return the bytes of the panels of ``rows`` rows of 32·blocks values."""
    return panel_count(blocks) * rows * PANEL_ROW_BYTES


@dataclass(frozen=True)
class Gemm:
    """A dense GEMM of prompt rows; its constants and its launch derive from these fields.

    ``blocks`` = K/32, ``row_tiles`` = N/16, ``staging``: ROWS_STAGING, PAIRS_STAGING or UNSTAGED.
    """

    rows: int
    blocks: int
    row_tiles: int
    columns: int
    staging: int
    wgmma: int = 1
    storage: Storage = BF16

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as fit in shared memory next to the staging buffers."""
        return stages_for(self.columns, self.staging)

    @property
    def panel_rows(self) -> int:
        """Rows of the panels: a multiple of the tile."""
        return ceil_div(self.rows, self.columns) * self.columns

    @property
    def tiles(self) -> int:
        """Output tiles of the product."""
        return ceil_div(self.row_tiles * PACKED_ROWS, TILE_ROWS) * (self.panel_rows // self.columns)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, then the staging of two warpgroups."""
        return ring_bytes(self.columns, self.staging, self.stages)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the panels."""
        return panel_bytes(self.blocks, self.panel_rows)

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """The constants of the kernel."""
        return (
            ("K_BLOCKS", self.blocks),
            ("ROW_TILES", self.row_tiles),
            ("COLUMNS", self.columns),
            ("STAGES", self.stages),
            ("WGMMA", self.wgmma),
            ("WEIGHTS", self.storage.code),
            ("SHARED_BYTES", self.shared_bytes),
        )


def ring_bytes(columns: int, staging: int, stages: int) -> int:
    """Return the shared memory of a ring of ``stages`` panels and of two staging buffers."""
    return columns * (stages * PANEL_ROW_BYTES + 2 * staging * 2)


def stages_for(columns: int, staging: int) -> int:
    """Return how many panels of ``columns`` tokens fit in a ring."""
    free = _SHARED_BYTES - _STATIC_SHARED_BYTES - ring_bytes(columns, staging, 0)
    return min(_MAX_STAGES, free // (columns * PANEL_ROW_BYTES))


def dense_gemm(request: LoweringRequest, weight: str, staging: int) -> Gemm:
    """Return the GEMM of ``x`` [T, K] and a packed weight.

    The tile is the tactic's, or else the one with the least predicted time. Raises SpecbuildError
    for a tactic that :func:`dense_tactics` does not list.
    """
    rows, width = request.tensors["x"].shape
    row_tiles, blocks, storage = weight_tiles(request.tensors[weight], width)
    columns = request.tactic.get("columns") or predicted_columns(
        rows, row_tiles, request.target.multiprocessors
    )
    if columns % COLUMN_STEP or not COLUMN_STEP <= columns <= MAX_COLUMNS:
        raise SpecbuildError(
            f"the tactic's tile has {columns} tokens, expected a multiple of {COLUMN_STEP} up to "
            f"{MAX_COLUMNS}: tune again"
        )
    wgmma = request.tactic.get("wgmma", 1)
    return Gemm(rows, blocks, row_tiles, columns, staging, wgmma, storage)


def dense_launches(
    request: LoweringRequest,
    gemm: Gemm,
    folder: str,
    *,
    constants: tuple[tuple[str, int | float | str], ...],
    rows: tuple[Argument, ...],
    product: tuple[Argument, ...],
) -> Lowering:
    """Return two launches: ``<folder>_rows`` writes x as panels, ``<folder>_gemm`` multiplies them.

    ``rows`` and ``product`` are the leading arguments of these kernels; the panels and the row
    counts follow.
    """

    def kernel(entry: str) -> Kernel:
        return Kernel(folder, entry, (*gemm.constants, *constants), file="prefill.cu")

    panels = OpLaunch(
        kernel(f"{folder}_rows"),
        grid=(ceil_div(gemm.rows, ROWS_PER_BLOCK), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=0,
        arguments=(*rows, "workspace_panels", gemm.rows, gemm.panel_rows),
    )
    multiplied = OpLaunch(
        kernel(f"{folder}_gemm"),
        grid=(min(gemm.tiles, request.target.multiprocessors), 1, 1),
        block=THREADS,
        shared_bytes=gemm.shared_bytes,
        arguments=(*product, "workspace_panels", gemm.rows),
    )
    return Lowering((panels, multiplied), (Workspace("workspace_panels", gemm.workspace_bytes),))


def dense_tactics(request: LoweringRequest, weight: str) -> tuple[Tactic, ...]:
    """Return the tiles to measure, by predicted time, and the kernel without wgmma last."""
    rows = request.tensors["x"].shape[0]
    row_tiles = request.tensors[weight].shape[0]
    ranked = _ranked_columns(rows, row_tiles, request.target.multiprocessors)
    return (*({"columns": columns} for columns in ranked[:4]), {"columns": ranked[0], "wgmma": 0})


def predicted_columns(rows: int, row_tiles: int, multiprocessors: int) -> int:
    """Return the tokens of a tile with the least predicted time: full waves × the time of a tile.

    The result of an output element does not depend on the tile.
    """
    return _ranked_columns(rows, row_tiles, multiprocessors)[0]


def _ranked_columns(rows: int, row_tiles: int, multiprocessors: int) -> list[int]:
    row_blocks = ceil_div(row_tiles * PACKED_ROWS, TILE_ROWS)
    weight_bytes = TILE_ROWS * PANEL_ROW_BYTES

    def cycles(columns: int) -> float:
        waves = ceil_div(row_blocks * ceil_div(rows, columns), multiprocessors)
        fetched = (weight_bytes + columns * PANEL_ROW_BYTES) / _L2_BYTES_PER_CYCLE
        return waves * max(fetched, columns * _CYCLES_PER_COLUMN)

    return sorted(_candidates(rows), key=lambda columns: (cycles(columns), columns))


def _candidates(rows: int) -> Iterator[int]:
    widest = min(MAX_COLUMNS, ceil_div(rows, COLUMN_STEP) * COLUMN_STEP)
    yield from range(COLUMN_STEP, widest + 1, COLUMN_STEP)
