"""RmsHead on a GPU: every warp has tiles of the vocabulary; another launch normalizes many rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.many_tokens import (
    FEW_PANEL_ROWS,
    FEWEST_PANEL_ROWS,
    MAX_PANEL_ROWS,
    PANEL_ROW_BYTES,
    PANEL_WARPS,
    TOKENS,
    normed_tokens,
    panel_bytes,
    panel_columns,
    panel_depth,
)
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.linear.slices import slices_of
from specbuild.plugins_cuda.linear.storage import BF16, Storage, weight_tiles
from specbuild.plugins_cuda.linear.streaming import (
    TOKENS_PER_TILE,
    Dense,
    Streaming,
    deep_enough,
    fragment_bytes,
    norm_bytes,
    require_decode_rows,
    require_tactic,
    token_tiles_for,
)
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.runtime.errors import SpecbuildError

Constants: TypeAlias = tuple[tuple[str, int | float | str], ...]

WARPS = 16
# 16-byte loads of a lane in flight, by groups of 8 rows.
_LOADS = {1: 18, 2: 12, 4: 10}
# The same for weights that are decoded.
_LOADS_OF_CODES = {1: 15, 2: 9, 4: 9}
# Static shared memory of HeadChoose: folds of 16 warps × 32 rows, and sampling parameters.
_STATIC_BYTES = 12 << 10
# Rows as panels (``panels``): two warpgroups share them, with two tiles per warp. The loads of a
# lane in flight, for both tiles: with up to 64 rows, with more rows, and with more rows of a
# quantized weight, whose decoding needs registers. Then the maximum of stages.
_PANEL_TILES = 2
_PANEL_LOADS, _PANEL_LOADS_OF_MANY, _PANEL_LOADS_OF_MANY_CODES = 24, 16, 12
_MAX_PANEL_STAGES = 12
# Static shared memory of HeadChoose, aligned: per row, folds of 16 segments and sampling
# parameters; per stage, two barriers.
_STATIC_BYTES_OF_ROW, _STATIC_BYTES_OF_PLACE, _STATIC_ALIGNMENT = 16 * 20 + 12, 16, 1024
_TACTICS: tuple[Tactic, ...] = ({}, {"loads": 6}, {"loads": 10})
_TACTICS_OF_SOME_ROWS: tuple[Tactic, ...] = (*_TACTICS, {"panels": 1})
_TACTICS_OF_MANY_ROWS: tuple[Tactic, ...] = ({}, {"panels": 0})
# Decoders of K-quants take so many registers that the others spill at some widths.
_FEW_LOADS: Tactic = {"loads": 4}
_SOME_ROWS = 17


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for more rows than a decode launch may have."""
    rows = request.tensors["logit_rows"].shape[0]
    head = head_streaming("RmsHead", request)
    cut = head.cut
    launch = OpLaunch(
        Kernel("rms_head", f"rms_head{head.suffix}", cut.constants, head.file),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *(
                ("weight", "logits", TOKENS)
                if head.norm
                else ("x", "logit_rows", "norm", "weight", "logits")
            ),
            rows,
        ),
    )
    return Lowering((*head.norm, launch), head.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the loads in flight, and whether many rows are panels."""
    rows = request.tensors["logit_rows"].shape[0]
    if rows < _SOME_ROWS:
        return _TACTICS
    if rows < FEWEST_PANEL_ROWS:
        return _TACTICS_OF_SOME_ROWS
    heavy = _weight(request).storage.heavy
    return (*_TACTICS_OF_MANY_ROWS, _FEW_LOADS) if heavy else _TACTICS_OF_MANY_ROWS


@dataclass(frozen=True)
class Head:
    """The launch of a head, and the launch of the norm before it, if there is one.

    ``file`` has the kernel; ``suffix`` ends the name of the entry point.
    """

    cut: Streaming
    file: str = "kernel.cu"
    suffix: str = ""
    norm: tuple[OpLaunch, ...] = ()
    workspaces: tuple[Workspace, ...] = ()


def segments_of(tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Return the number of segments and their tiles: about one segment per warp of the GPU."""
    segment_tiles = -(-tiles // (multiprocessors * WARPS))
    return -(-tiles // segment_tiles), segment_tiles


def head_streaming(
    op: str, request: LoweringRequest, *, fold_bytes: int = 0, storage: Storage | None = None
) -> Head:
    """Return the launch sizes of a head; SpecbuildError if it does not fit in shared memory.

    ``fold_bytes``: shared memory of the panel kernel besides the panels. ``storage``: the format of
    the weight, if its shape does not determine it.
    """
    weight = _weight(request, storage)
    blocks = weight.blocks
    rows = request.tensors["logit_rows"].shape[0]
    require_decode_rows(op, rows)
    require_tactic(op, request.tactic, ("ctas", "loads", "panels"))
    rounding_of(op, request.attributes)
    if request.tactic.get("panels", int(rows >= FEWEST_PANEL_ROWS)):
        return _by_panels(request, rows, fold_bytes)
    max_bytes = request.target.shared_bytes_per_block - _STATIC_BYTES
    for token_tiles in token_tiles_for(rows):
        shared = fragment_bytes(blocks, token_tiles) + norm_bytes(blocks, token_tiles)
        if shared <= max_bytes:
            return Head(_cut(request, weight, token_tiles, shared))
    raise SpecbuildError(
        f"{op}: {blocks * 32} columns of {TOKENS_PER_TILE} rows do not fit in {max_bytes} bytes of "
        "shared memory; build for the cpu backend"
    )


def _by_panels(request: LoweringRequest, rows: int, fold_bytes: int) -> Head:
    """Return the launch sizes for rows that are panels."""
    weight = _weight(request)
    columns = panel_columns(rows, -(-rows // MAX_PANEL_ROWS))
    many = _PANEL_LOADS_OF_MANY_CODES if weight.storage.scaled else _PANEL_LOADS_OF_MANY
    default = _PANEL_LOADS if columns <= FEW_PANEL_ROWS else many
    panels = -(-weight.blocks // 2)
    depth = panel_depth(
        panels, request.tactic.get("loads", default) // _PANEL_TILES, weight.storage
    )
    static = columns * _STATIC_BYTES_OF_ROW + _MAX_PANEL_STAGES * _STATIC_BYTES_OF_PLACE
    static += -static % _STATIC_ALIGNMENT
    left = request.target.shared_bytes_per_block - static - fold_bytes
    stages = min(panels, _MAX_PANEL_STAGES, left // (columns * PANEL_ROW_BYTES))
    shared = stages * columns * PANEL_ROW_BYTES + fold_bytes
    constants, grid = _segments(request, weight, columns)
    cut = Streaming(
        (
            *constants,
            ("WARPS", PANEL_WARPS),
            ("TILES", _PANEL_TILES),
            ("NORMED_BYTES", panel_bytes(weight.blocks, columns)),
            ("DEPTH", depth),
            ("STAGES", stages),
            ("SHARED_BYTES", shared),
        ),
        grid,
        PANEL_WARPS * 32,
        shared,
    )
    norm = _normed(request, columns // TOKENS_PER_TILE)
    tokens = Workspace(TOKENS, grid[1] * panel_bytes(weight.blocks, columns))
    return Head(cut, "panels.cu", "_of_panels", (norm,), (tokens,))


def _normed(request: LoweringRequest, token_tiles: int) -> OpLaunch:
    # All warps normalize in slices of K, although every warp multiplies all of K.
    return normed_tokens(
        replace(_weight(request), storage=BF16),
        token_tiles,
        eps=float(request.attributes["eps"]),
        rounding=str(request.attributes["rounding"]),
        panels=True,
        gathered=True,
    )


def _weight(request: LoweringRequest, storage: Storage | None = None) -> Dense:
    tensors = request.tensors
    tiles, blocks, storage = weight_tiles(tensors["weight"], tensors["x"].shape[1], storage)
    return Dense("", tiles, blocks, tensors["logit_rows"].shape[0], normed=True, storage=storage)


def _depth(request: LoweringRequest, weight: Dense, token_tiles: int) -> int:
    default = _LOADS_OF_CODES if weight.storage.scaled else _LOADS
    loads = request.tactic.get("loads", default[token_tiles])
    return deep_enough(weight.storage.units(weight.blocks), loads // weight.storage.loads)


def _cut(request: LoweringRequest, weight: Dense, token_tiles: int, shared: int) -> Streaming:
    constants, grid = _segments(request, weight, TOKENS_PER_TILE * token_tiles)
    constants = (
        *constants,
        ("WARPS", WARPS),
        ("NORM_SLICES", slices_of(weight.blocks)),
        ("DEPTH", _depth(request, weight, token_tiles)),
        ("NORM_ROUNDING", rounding_code(str(request.attributes["rounding"]))),
        ("SHARED_BYTES", shared),
        ("EPS", request.attributes["eps"]),
    )
    return Streaming(constants, grid, WARPS * 32, shared)


def _segments(
    request: LoweringRequest, weight: Dense, columns: int
) -> tuple[Constants, tuple[int, int, int]]:
    """Return the constants of all kernels and the grid: segments × groups of ``columns`` rows."""
    segments, segment_tiles = segments_of(weight.tiles, request.target.multiprocessors)
    passes = -(-weight.rows // columns)
    ctas = max(1, request.tactic.get("ctas", request.target.multiprocessors) // passes)
    constants = (
        ("K_BLOCKS", weight.blocks),
        ("TILE_COUNT", weight.tiles),
        ("WEIGHTS", weight.storage.code),
        ("TOKEN_TILES", columns // TOKENS_PER_TILE),
        ("SEGMENTS", segments),
        ("SEGMENT_TILES", segment_tiles),
        ("LOGIT_DIVISOR", float(request.attributes["divisor"])),
        ("LOGIT_CAP", float(request.attributes["cap"])),
        ("VOCAB", int(request.attributes["vocab_size"]) or weight.tiles * TILE_ROWS),
    )
    return constants, (min(segments, ctas), passes, 1)
