"""RmsHead on a GPU: one launch in which every warp has tiles of the vocabulary to itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.many_tokens import TOKENS, normed_tokens
from specbuild.plugins_cuda.linear.storage import BF16, weight_tiles
from specbuild.plugins_cuda.linear.streaming import (
    TOKENS_PER_TILE,
    Dense,
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
# Of a kernel that stages 64 rows: their sums take the registers of 16.
_STAGED_WARPS = 8
_FRAGMENT_BYTES = 512
# 16-byte loads that a lane keeps in flight, by groups of 8 rows.
_LOADS = {1: 18, 2: 12, 4: 10, 8: 12}
# The same of weights that are decoded.
_LOADS_OF_CODES = {1: 15, 2: 9, 4: 9, 8: 9}
# ``staged`` reads the weight once for 64 rows, which pass through shared memory in stages.
_STAGED_TILES, _MOST_STAGES, _FEWEST_STAGES = 8, 6, 3
# Static variables of HeadChoose: folds of 16 warps by 64 rows, and how the rows choose.
_STATIC_BYTES = 24 << 10
_TACTICS: tuple[Tactic, ...] = ({}, {"loads": 6}, {"loads": 10})
_TACTICS_OF_MANY_ROWS: tuple[Tactic, ...] = ({}, {"staged": 0}, {"staged": 1})
_TACTICS_OF_CODES: tuple[Tactic, ...] = ({}, {"loads": 6}, {"loads": 10})
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
    if _weight(request).storage.scaled:
        return _TACTICS_OF_CODES
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
    blocks = _weight(request).blocks
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
    if request.tactic.get("staged", int(_stages_pay(request, rows))):
        depth = _depth(request, _STAGED_TILES)
        unit_blocks = _weight(request).storage.unit_blocks
        stage_bytes = depth * unit_blocks * _STAGED_TILES * _FRAGMENT_BYTES
        stages = min(_MOST_STAGES, most // stage_bytes)
        if stages >= _FEWEST_STAGES:
            return _staged(request, rows, depth, stages, stages * stage_bytes)
    for token_tiles in token_tiles_for(rows):
        shared = fragment_bytes(blocks, token_tiles) + norm_bytes(blocks, token_tiles)
        if shared <= most:
            depth = _depth(request, token_tiles)
            return Head(_cut(request, rows, token_tiles, depth, 0, shared))
    raise SpecbuildError(
        f"{op}: {blocks * 32} columns of {TOKENS_PER_TILE} rows do not fit {most} bytes of shared "
        "memory; build for the cpu backend"
    )


def _stages_pay(request: LoweringRequest, rows: int) -> bool:
    """Whether stages halve the passes over a bf16 weight: others cost less than the stages do."""
    half = TOKENS_PER_TILE * _STAGED_TILES // 2
    return not _weight(request).storage.scaled and -(-rows // half) >= 2 * -(-rows // (2 * half))


def _weight(request: LoweringRequest) -> Dense:
    tensors = request.tensors
    tiles, blocks, storage = weight_tiles(tensors["weight"], tensors["x"].shape[1])
    return Dense("", tiles, blocks, tensors["logit_rows"].shape[0], normed=True, storage=storage)


def _depth(request: LoweringRequest, token_tiles: int) -> int:
    weight = _weight(request)
    usual = _LOADS_OF_CODES if weight.storage.scaled else _LOADS
    loads = request.tactic.get("loads", usual[token_tiles])
    return deep_enough(weight.storage.units(weight.blocks), loads // weight.storage.loads)


def _staged(request: LoweringRequest, rows: int, depth: int, stages: int, shared: int) -> Head:
    weight = _weight(request)
    blocks = weight.blocks
    cut = _cut(request, rows, _STAGED_TILES, depth, stages, shared)
    # The norm's slices are its own: every warp multiplies all of K.
    norm = normed_tokens(
        replace(weight, storage=BF16),
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
    weight = _weight(request)
    tiles, blocks = weight.tiles, weight.blocks
    segments, segment_tiles = segments_of(tiles, request.target.multiprocessors)
    passes = -(-rows // (TOKENS_PER_TILE * token_tiles))
    ctas = max(1, request.tactic.get("ctas", request.target.multiprocessors) // passes)
    warps = _STAGED_WARPS if stages else WARPS
    constants = (
        ("K_BLOCKS", blocks),
        ("TILE_COUNT", tiles),
        ("WARPS", warps),
        ("WEIGHTS", weight.storage.code),
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
    return Streaming(constants, (min(segments, ctas), passes, 1), warps * 32, shared)
