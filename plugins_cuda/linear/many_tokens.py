"""How a dense kernel of more than a few tokens is cut: CTAs split the rows of the weight and K.

``_device/many_tokens.cuh`` describes the kernels; the order of sums is that of ``streaming.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch, Tactic, Workspace
from specbuild.plugins_cuda.linear.streaming import (
    STREAMING_KEYS,
    TOKENS_PER_TILE,
    Dense,
    Streaming,
    deep_enough,
    norm_bytes,
    require_decode_rows,
    require_tactic,
    streaming_tactics,
)

SUMS, ARRIVED, TOKENS = "workspace_sums", "workspace_arrived", "workspace_tokens"
# From here on the tokens that every CTA would read and norm cost more than sharing them out.
_FEWEST_ROWS = 17
# The same beside a weight of 4 or 8 bits that is not twice what all CTAs read of the tokens.
_FEWEST_ROWS_BY_CODES = 9
# Below this the whole of K is little for a warp, and there is nothing to share out.
_FEWEST_BLOCKS = 32
_MOST_WARPS = 16
# Decoding for 64 tokens takes more registers than 16 warps leave each.
_MOST_WARPS_OF_CODES = {1: 16, 2: 16, 4: 16, 8: 12}
_HALF_TILE_BYTES = _FRAGMENT_BYTES = 512
# What a kernel's static variables take, aligned.
_STATIC_BYTES = 1024
# 16-byte loads of weights that a lane keeps in flight, by groups of 8 tokens.
_LOADS = {1: 20, 2: 20, 4: 16, 8: 16}
# The same of weights that are decoded.
_LOADS_OF_CODES = {1: 12, 2: 12, 4: 12, 8: 9}
# Steps in flight of a candidate that takes few registers.
_FEW_STEPS = 2


@dataclass(frozen=True)
class ManyTokens:
    """The launch, but for its entry point, and the workspaces that it shares with the norm's."""

    cut: Streaming
    token_tiles: int
    workspaces: tuple[Workspace, ...]


def many_tokens(request: LoweringRequest, dense: Dense) -> ManyTokens | None:
    """The cut for many tokens; None where few are, or where a group's tokens do not fit.

    SpecbuildError for more rows than a decode launch may have, or an unknown tactic.
    """
    require_decode_rows(dense.op, dense.rows)
    require_tactic(dense.op, request.tactic, STREAMING_KEYS)
    tokens_weigh = dense.weight_bytes < 2 * request.target.multiprocessors * dense.token_bytes
    fewest = _FEWEST_ROWS_BY_CODES if dense.storage.scaled and tokens_weigh else _FEWEST_ROWS
    wanted = dense.rows >= fewest and dense.blocks >= _FEWEST_BLOCKS
    if not request.tactic.get("many", int(wanted)):
        return None
    storage, slices, group_slices = dense.storage, dense.slices, dense.group_slices
    token_tiles = 1
    while token_tiles < 8 and token_tiles * TOKENS_PER_TILE < dense.rows:
        token_tiles *= 2
    most_warps = _MOST_WARPS_OF_CODES[token_tiles] if storage.scaled else _MOST_WARPS
    warps = most_warps // group_slices * group_slices
    token_bytes = group_slices * dense.slice_blocks * token_tiles * _FRAGMENT_BYTES
    shared = token_bytes + warps * token_tiles * _HALF_TILE_BYTES
    if shared + _STATIC_BYTES > request.target.shared_bytes_per_block:
        return None
    groups = slices // group_slices
    ctas = request.tactic.get("ctas", request.target.multiprocessors)
    shares = min(dense.tiles, max(1, ctas // groups))
    passes = -(-dense.rows // (token_tiles * TOKENS_PER_TILE))
    usual = _LOADS_OF_CODES if storage.scaled else _LOADS
    loads = request.tactic.get("loads", usual[token_tiles])
    constants = (
        ("K_BLOCKS", dense.blocks),
        ("TILE_COUNT", dense.tiles),
        ("WARPS", warps),
        ("SLICES", slices),
        ("GROUP_SLICES", group_slices),
        ("WEIGHTS", storage.code),
        ("MANY_TOKENS", 1),
        ("TOKEN_TILES", token_tiles),
        ("DEPTH", deep_enough(dense.slice_units, loads // storage.loads)),
        ("CTAS", shares),
        ("SHARED_BYTES", shared),
    )
    sums = passes * groups * dense.tiles * token_tiles * _HALF_TILE_BYTES
    return ManyTokens(
        Streaming(constants, (groups * shares, passes, 1), warps * 32, shared),
        token_tiles,
        (
            Workspace(TOKENS, passes * groups * token_bytes if dense.normed else 16),
            Workspace(SUMS, sums),
            Workspace(ARRIVED, passes * shares * 4, zeroed=True),
        ),
    )


def dense_tactics(request: LoweringRequest, dense: Dense) -> tuple[Tactic, ...]:
    """The candidates of a dense decode launch, the default first."""
    if dense.rows <= TOKENS_PER_TILE:
        shared_out = ({"many": 1},) if dense.storage.scaled and dense.rows > 1 else ()
        return (*streaming_tactics(request, dense), *shared_out)
    if many_tokens(request, dense) is None:
        return (*streaming_tactics(request, dense)[:3], {"many": 1})
    return ({}, {"many": 0}, {"loads": _FEW_STEPS * dense.storage.loads})


def normed_tokens(
    dense: Dense, token_tiles: int, *, eps: float, rounding: str, gathered: bool = False
) -> OpLaunch:
    """The launch that norms the tokens of ``dense`` into ``workspace_tokens``.

    ``gathered``: they are the rows ``logit_rows`` of ``x``.
    """
    blocks, rows, slices = dense.blocks, dense.rows, dense.slices
    constants = (
        ("K_BLOCKS", blocks),
        ("SLICES", slices),
        ("UNIT_BLOCKS", dense.storage.unit_blocks),
        ("TOKEN_TILES", token_tiles),
        ("CAST_FIRST", int(rounding == "llama")),
        ("HAS_ROWS", int(gathered)),
        ("EPS", eps),
    )
    return OpLaunch(
        Kernel("linear", "normed_tokens", constants, file="normed_tokens.cu"),
        grid=(-(-rows // TOKENS_PER_TILE), 1, 1),
        block=slices * 32,
        shared_bytes=dense.fragment_bytes(1) + norm_bytes(blocks, 1),
        arguments=("x", "logit_rows" if gathered else None, "norm", TOKENS, rows),
    )
