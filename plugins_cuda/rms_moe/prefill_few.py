"""Shared memory of the experts' prefill GEMMs with few rows per expert (``prefill_few.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.prefill_gemm import PANEL_ROW_BYTES
from specbuild.plugins_cuda.rms_moe.packing import STEP_BYTES
from specbuild.runtime.errors import SpecbuildError

# Warps of a CTA, 16 weight rows each; a tile with more tokens needs more registers per thread.
WARPS = (12, 16)
# Steps of a packed tile that one copy moves: a divisor of a stage's.
CHUNK_STEPS = 5
MAX_COLUMNS = 96
# Tokens of the widest tile and warps of a CTA, by the maximum of an expert's rows on average.
# Launches with fewer rows, down to FEWEST_ROWS, use the first tiles.
FEW_TILES = {16: (48, 16), 32: (64, 12), 64: (96, 12)}
FEWEST_ROWS = 9
_SHARED_BYTES, _STATIC_BYTES = 227 * 1024, 2048
_MAX_STAGES, _FEWEST_STAGES, _MAX_CHUNKS = 8, 3, 8
# Weights in flight for the bandwidth of memory: 35 bytes per nanosecond and multiprocessor, a
# microsecond of latency, and as much again while the previous stage is released.
_WEIGHTS_UNDER_WAY = 72 * 1024


@dataclass(frozen=True)
class Rings:
    """The stages of tokens and of weights, and the dynamic shared memory of both."""

    stages: int
    chunks: int
    shared_bytes: int


def lay_out_rings(columns: int, staging: int, warps: int, warp_tiles: int) -> Rings:
    """Return the longest ring of tokens together with enough weights.

    ``staging``: 16-bit values of a token and warpgroup. ``warp_tiles``: packed tiles of a warp.
    Raises SpecbuildError if they do not fit.
    """
    slot = warps * warp_tiles * STEP_BYTES * (CHUNK_STEPS + 1)
    outputs = columns * warps // 4 * staging * 2
    for stages in range(_MAX_STAGES, _FEWEST_STAGES - 1, -1):
        tokens = columns * PANEL_ROW_BYTES * stages
        free = _SHARED_BYTES - _STATIC_BYTES - outputs - tokens
        chunks = min(_MAX_CHUNKS, free // slot)
        if chunks >= 2 and chunks * slot >= _WEIGHTS_UNDER_WAY:
            return Rings(stages, chunks, tokens + chunks * slot + outputs)
    raise SpecbuildError(
        f"RmsMoe: the tactic has tiles of {columns} tokens for {warps} warps, which do not fit in "
        "shared memory with their weights; tune again"
    )
