"""RmsHead on a GPU: one launch in which every warp has tiles of the vocabulary to itself."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.many_tokens import TOKENS, normed_tokens
from specbuild.plugins_cuda.linear.streaming import (
    TOKENS_PER_TILE,
    Streaming,
    deep_enough,
    fragment_bytes,
    norm_bytes,
    require_decode_rows,
    require_tactic,
    slices_of,
    token_tiles_for,
)
from specbuild.plugins_cuda.rms_norms import ROUNDINGS
from specbuild.runtime.errors import SpecbuildError

WARPS = 16
_FRAGMENT_BYTES = 512
# 16-byte loads that a lane keeps in flight, by groups of 8 rows.
_LOADS = {1: 18, 2: 12, 4: 10, 8: 12}
# ``staged`` reads the weight once for 64 rows, which pass through shared memory in stages. It is no
# default: on an H200 a row's log-probability in it was not always, bit for bit, that of the others.
_STAGED_TILES, _MOST_STAGES, _FEWEST_STAGES = 8, 6, 3
# Static variables of HeadChoose: folds of 16 warps by 64 rows, and how the rows choose.
_STATIC_BYTES = 24 << 10
_TACTICS: tuple[Tactic, ...] = ({}, {"loads": 6}, {"loads": 10})
_TACTICS_OF_MANY_ROWS: tuple[Tactic, ...] = ({}, {"staged": 1})
_MANY_ROWS = 33


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError for more rows than a decode launch may have."""
    rows = request.tensors["logit_rows"].shape[0]
    head = head_streaming("RmsHead", request)
    cut = head.cut
    launch = OpLaunch(
        Kernel("rms_head", "rms_head_of_many" if head.norm else "rms_head", cut.constants),
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
    """Loads in flight, and whether more than 32 rows pass through shared memory in stages."""
    rows = request.tensors["logit_rows"].shape[0]
    return _TACTICS if rows < _MANY_ROWS else _TACTICS_OF_MANY_ROWS


@dataclass(frozen=True)
class Head:
    """The launch of a vocabulary projection, and the norm's in front of it where it has one."""

    cut: Streaming
    norm: tuple[OpLaunch, ...] = ()
    workspaces: tuple[Workspace, ...] = ()


def segments_of(tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Segments of the vocabulary and tiles in each: one segment for each warp of the GPU."""
    segment_tiles = -(-tiles // (multiprocessors * WARPS))
    return -(-tiles // segment_tiles), segment_tiles


def head_streaming(op: str, request: LoweringRequest) -> Head:
    """How a vocabulary projection is cut; SpecbuildError where it does not fit."""
    blocks = request.tensors["weight"].shape[1]
    rows = request.tensors["logit_rows"].shape[0]
    require_decode_rows(op, rows)
    require_tactic(op, request.tactic, ("ctas", "loads", "staged"))
    rounding = request.attributes["rounding"]
    if rounding not in ROUNDINGS:
        raise SpecbuildError(
            f"{op}: rounding {rounding!r} is unknown, expected {' or '.join(ROUNDINGS)}; "
            "export the model again"
        )
    most = request.target.shared_bytes_per_block - _STATIC_BYTES
    if request.tactic.get("staged", 0):
        depth = _depth(request, blocks, _STAGED_TILES)
        stage_bytes = depth * _STAGED_TILES * _FRAGMENT_BYTES
        stages = min(_MOST_STAGES, most // stage_bytes)
        if stages >= _FEWEST_STAGES:
            return _staged(request, rows, depth, stages, stages * stage_bytes)
    for token_tiles in token_tiles_for(rows):
        shared = fragment_bytes(blocks, token_tiles) + norm_bytes(blocks, token_tiles)
        if shared <= most:
            depth = _depth(request, blocks, token_tiles)
            return Head(_cut(request, rows, token_tiles, depth, 0, shared))
    raise SpecbuildError(
        f"{op}: {blocks * 32} columns of {TOKENS_PER_TILE} rows do not fit {most} bytes of shared "
        "memory; build for the cpu backend"
    )


def _depth(request: LoweringRequest, blocks: int, token_tiles: int) -> int:
    return deep_enough(blocks, request.tactic.get("loads", _LOADS[token_tiles]) // 2)


def _staged(request: LoweringRequest, rows: int, depth: int, stages: int, shared: int) -> Head:
    blocks = request.tensors["weight"].shape[1]
    cut = _cut(request, rows, _STAGED_TILES, depth, stages, shared)
    norm = normed_tokens(
        blocks,
        rows,
        _STAGED_TILES,
        eps=float(request.attributes["eps"]),
        rounding=str(request.attributes["rounding"]),
        gathered=True,
    )
    tokens = cut.grid[1] * fragment_bytes(blocks, _STAGED_TILES)
    return Head(cut, (norm,), (Workspace(TOKENS, tokens),))


def _cut(
    request: LoweringRequest, rows: int, token_tiles: int, depth: int, stages: int, shared: int
) -> Streaming:
    tiles, blocks, _ = request.tensors["weight"].shape
    segments, segment_tiles = segments_of(tiles, request.target.multiprocessors)
    passes = -(-rows // (TOKENS_PER_TILE * token_tiles))
    ctas = max(1, request.tactic.get("ctas", request.target.multiprocessors) // passes)
    constants = (
        ("K_BLOCKS", blocks),
        ("TILE_COUNT", tiles),
        ("WARPS", WARPS),
        ("NORM_SLICES", slices_of(blocks)),
        ("NORMED_BYTES", fragment_bytes(blocks, token_tiles)),
        ("TOKEN_TILES", token_tiles),
        ("DEPTH", depth),
        ("STAGES", stages),
        ("SEGMENTS", segments),
        ("SEGMENT_TILES", segment_tiles),
        ("CAST_FIRST", int(request.attributes["rounding"] == "llama")),
        ("SHARED_BYTES", shared),
        ("EPS", request.attributes["eps"]),
    )
    return Streaming(constants, (min(segments, ctas), passes, 1), WARPS * 32, shared)
