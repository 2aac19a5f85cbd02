"""The launches of dense kernels for many tokens: CTAs split the rows of the weight and K.

``_device/many_tokens.cuh`` and, for more rows, ``_device/many_panels.cuh`` describe the kernels.
The order of sums is that of ``streaming.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch, Tactic, Workspace
from specbuild.plugins_cuda.linear.storage import BF16, Storage
from specbuild.plugins_cuda.linear.streaming import (
    MAX_PASS_ROWS,
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
from specbuild.plugins_cuda.rms_norms import rounding_code

SUMS, ARRIVED, TOKENS = "workspace_sums", "workspace_arrived", "workspace_tokens"
# From here on, reading and normalizing all tokens in every CTA costs more than splitting K.
_FEWEST_ROWS = 17
# The same with a weight of 4 or 8 bits, unless it has twice the bytes that all CTAs read of tokens.
_FEWEST_ROWS_BY_CODES = 9
# From here on, panels, which warpgroups share, cost less than fragments in each warp. Projections
# with bf16 weights use them from _FEWEST_ROWS on, if slices have complete panels.
FEWEST_PANEL_ROWS = 33
# With fewer blocks, all of K is little work for a warp, and a split gains nothing.
_FEWEST_BLOCKS = 32
_MAX_WARPS = 16
# Decoding for 64 tokens needs more registers than each of 16 warps has.
_MAX_WARPS_OF_CODES = {1: 16, 2: 16, 4: 16, 8: 12}
_HALF_TILE_BYTES = _FRAGMENT_BYTES = 512
# The static shared memory of a kernel, aligned.
_STATIC_BYTES = 1024
# 16-byte loads of weights of a lane in flight, by groups of 8 tokens.
_LOADS = {1: 20, 2: 20, 4: 12, 8: 16}
# The same for weights that are decoded.
_LOADS_OF_CODES = {1: 12, 2: 12, 4: 12, 8: 9}
# Steps in flight of a candidate with few registers.
_FEW_STEPS = 2
# Two warpgroups multiply by panels. With 224 to 255 registers per lane they have as many loads in
# flight as four would have. For quantized weights there are three, if their sums leave registers
# and no warpgroup copies rows.
PANEL_WARPS, _PANEL_WARPS_OF_CODES, _MAX_COLUMNS_OF_CODES = 8, 12, 96
# The warpgroup that copies tokens, if no previous launch writes panels (row_panels.cuh).
_ROW_WARPS = 4
# 16-byte loads of weights of a lane in flight, with sums of up to 64 tokens: for one slice of K,
# for several long ones that are added, for several short ones.
_PANEL_LOADS_OF_SLICE, _PANEL_LOADS_OF_LONG, _PANEL_LOADS_OF_SHORT = 36, 32, 24
# The same with more tokens, by whether a previous launch writes panels: copying needs registers.
_PANEL_LOADS_OF_MOST = {True: 20, False: 16}
_FEW_PANEL_LOADS = 12
# The same for quantized weights: for one slice of K, and for several, which need registers for two
# sets of sums. They are all loads of a tile, if the compiler has enough registers: it has with 64
# tokens, but not with 48 or 80.
_PANEL_LOADS_OF_CODES, _PANEL_LOADS_OF_SOME_CODES, _PANEL_LOADS_OF_MOST_CODES = 18, 15, 5
_FEW_PANEL_ROWS_OF_CODES = 48
_LONG_SLICE_BLOCKS = 8
FEW_PANEL_ROWS, MAX_PANEL_ROWS = 64, 128
# wgmma processes multiples of 16 tokens; bytes of a token in a panel; a panel's two barriers.
_COLUMNS_STEP, PANEL_ROW_BYTES, _BARRIER_BYTES = 16, 128, 16
# Warps of the launch that writes panels without a norm, and tokens of a CTA that normalizes.
_TOKEN_WARPS, _NORMED_TOKENS = 8, 2
# The 64 columns of a panel.
_PANEL_BLOCKS = 2


@dataclass(frozen=True)
class ManyTokens:
    """The launch without its kernel, and the workspaces that it shares with the launch of tokens.

    ``ready``: whether a previous launch writes the tokens in their final form. ``panels``: whether
    tokens are panels of ``token_tiles`` groups of 8.
    """

    cut: Streaming
    token_tiles: int
    workspaces: tuple[Workspace, ...]
    ready: bool
    panels: bool = False


def many_tokens(request: LoweringRequest, dense: Dense) -> ManyTokens | None:
    """Return the launch for many tokens; None if there are few, or a group's tokens do not fit.

    Raises SpecbuildError for more rows than a decode launch may have, or an unknown tactic.
    """
    require_decode_rows(dense.op, dense.rows)
    require_tactic(dense.op, request.tactic, STREAMING_KEYS)
    tokens_weigh = dense.weight_bytes < 2 * request.target.multiprocessors * dense.token_bytes
    # If decoding takes longer, splitting K gains less than the addition of sums costs.
    is_slow = dense.storage.heavy and dense.storage.loads == 1
    weighs_tokens = dense.storage.scaled and not is_slow and tokens_weigh
    fewest = _FEWEST_ROWS_BY_CODES if weighs_tokens else _FEWEST_ROWS
    is_useful = dense.rows >= fewest and dense.blocks >= _FEWEST_BLOCKS
    if not request.tactic.get("many", int(is_useful)):
        return None
    fewest_in_panels = FEWEST_PANEL_ROWS if dense.storage.scaled else _FEWEST_ROWS
    if request.tactic.get("panels", int(dense.rows >= fewest_in_panels)):
        panels = _by_panels(request, dense)
        if panels is not None:
            return panels
    storage, slices, group_slices = dense.storage, dense.slices, dense.group_slices
    token_tiles = 1
    while token_tiles < 8 and token_tiles * TOKENS_PER_TILE < dense.rows:
        token_tiles *= 2
    most_warps = _MAX_WARPS_OF_CODES[token_tiles] if storage.scaled else _MAX_WARPS
    warps = most_warps // group_slices * group_slices
    token_bytes = group_slices * dense.slice_blocks * token_tiles * _FRAGMENT_BYTES
    shared = token_bytes + warps * token_tiles * _HALF_TILE_BYTES
    if shared + _STATIC_BYTES > request.target.shared_bytes_per_block:
        return None
    groups, shares = _groups_and_shares(request, dense)
    passes = -(-dense.rows // (token_tiles * TOKENS_PER_TILE))
    usual = _LOADS_OF_CODES if storage.scaled else _LOADS
    loads = request.tactic.get("loads", storage.held_loads(usual[token_tiles]))
    constants = (
        ("K_BLOCKS", dense.blocks),
        ("TILE_COUNT", dense.tiles),
        ("WARPS", warps),
        ("SLICES", slices),
        ("GROUP_SLICES", group_slices),
        ("WEIGHTS", storage.code),
        ("PANELS", 0),
        ("TOKENS_READY", int(dense.normed)),
        ("TOKEN_TILES", token_tiles),
        ("DEPTH", deep_enough(dense.slice_units, loads // storage.loads)),
        ("CTAS", shares),
        ("SHARED_BYTES", shared),
    )
    ready_bytes = passes * groups * token_bytes if dense.normed else 0
    workspaces = _workspaces(request, dense, passes, token_tiles, ready_bytes)
    cut = Streaming(constants, (groups * shares, passes, 1), warps * 32, shared)
    return ManyTokens(cut, token_tiles, workspaces, ready=dense.normed)


def dense_kernel(
    folder: str, constants: tuple[tuple[str, int | float | str], ...], many: ManyTokens | None
) -> Kernel:
    """Return the kernel named like its folder, or ``<folder>_of_many`` for many tokens."""
    if many is None:
        return Kernel(folder, folder, constants)
    return Kernel(folder, f"{folder}_of_many", constants, "many_tokens.cu")


def _by_panels(request: LoweringRequest, dense: Dense) -> ManyTokens | None:
    """Return the launch with panels; None if a panel would be in two slices of K."""
    slice_blocks, group_slices = dense.slice_blocks, dense.group_slices
    storage = dense.storage
    if slice_blocks % _PANEL_BLOCKS:
        return None
    passes = -(-dense.rows // MAX_PANEL_ROWS)
    columns = panel_columns(dense.rows, passes)
    panels = group_slices * slice_blocks // _PANEL_BLOCKS
    stage_bytes = columns * PANEL_ROW_BYTES + _BARRIER_BYTES
    stages = min(panels, (request.target.shared_bytes_per_block - _STATIC_BYTES) // stage_bytes)
    shared = stages * stage_bytes
    ready = dense.normed or stages < panels
    groups, shares = _groups_and_shares(request, dense)
    token_tiles = columns // TOKENS_PER_TILE
    by_three = storage.scaled and ready and columns <= _MAX_COLUMNS_OF_CODES
    multiplying = _PANEL_WARPS_OF_CODES if by_three else PANEL_WARPS
    usual_loads = storage.held_loads(_panel_loads(dense, columns, ready=ready))
    constants = (
        ("K_BLOCKS", dense.blocks),
        ("TILE_COUNT", dense.tiles),
        ("WARPS", multiplying),
        ("SLICES", dense.slices),
        ("GROUP_SLICES", group_slices),
        ("SLICE_BLOCKS", slice_blocks),
        ("WEIGHTS", storage.code),
        ("PANELS", 1),
        ("TOKEN_TILES", token_tiles),
        ("TOKENS_READY", int(ready)),
        ("STAGES", stages),
        ("DEPTH", panel_depth(panels, request.tactic.get("loads", usual_loads), storage)),
        ("CTAS", shares),
        ("SHARED_BYTES", shared),
    )
    ready_bytes = passes * panel_bytes(dense.blocks, columns) if ready else 0
    workspaces = _workspaces(request, dense, passes, token_tiles, ready_bytes)
    warps = multiplying if ready else multiplying + _ROW_WARPS
    cut = Streaming(constants, (groups * shares, passes, 1), warps * 32, shared)
    return ManyTokens(cut, token_tiles, workspaces, ready=ready, panels=True)


def _panel_loads(dense: Dense, columns: int, *, ready: bool) -> int:
    if dense.storage.scaled:
        if dense.group_slices == 1:
            return _PANEL_LOADS_OF_CODES
        some = _FEW_PANEL_ROWS_OF_CODES < columns <= FEW_PANEL_ROWS
        return _PANEL_LOADS_OF_SOME_CODES if some else _PANEL_LOADS_OF_MOST_CODES
    if columns > FEW_PANEL_ROWS:
        return _PANEL_LOADS_OF_MOST[ready]
    if dense.group_slices == 1:
        return _PANEL_LOADS_OF_SLICE
    long = dense.slice_blocks >= _LONG_SLICE_BLOCKS
    return _PANEL_LOADS_OF_LONG if long else _PANEL_LOADS_OF_SHORT


def panel_columns(rows: int, passes: int) -> int:
    """Return the tokens of a panel if ``passes`` passes process ``rows`` rows."""
    return -(-rows // passes // _COLUMNS_STEP) * _COLUMNS_STEP


def panel_bytes(blocks: int, columns: int) -> int:
    """Return the bytes of ``columns`` tokens of ``blocks`` blocks as panels."""
    return -(-blocks // _PANEL_BLOCKS) * columns * PANEL_ROW_BYTES


def panel_depth(panels: int, loads: int, storage: Storage = BF16) -> int:
    """Return a tile's blocks in flight in a lane: complete panels, about ``loads`` loads."""
    loads_of_panel = storage.units(_PANEL_BLOCKS) * storage.loads
    return _PANEL_BLOCKS * deep_enough(panels, loads // loads_of_panel)


def _groups_and_shares(request: LoweringRequest, dense: Dense) -> tuple[int, int]:
    """Return the groups of K slices, and the shares of tiles: a CTA has one of each."""
    groups = dense.slices // dense.group_slices
    ctas = request.tactic.get("ctas", request.target.multiprocessors)
    return groups, min(dense.tiles, max(1, ctas // groups))


def _workspaces(
    request: LoweringRequest, dense: Dense, passes: int, token_tiles: int, ready_bytes: int
) -> tuple[Workspace, ...]:
    groups, shares = _groups_and_shares(request, dense)
    sums = passes * groups * dense.tiles * token_tiles * _HALF_TILE_BYTES
    return (
        *((Workspace(TOKENS, ready_bytes),) if ready_bytes else ()),
        Workspace(SUMS, sums),
        Workspace(ARRIVED, passes * shares * 4, zeroed=True),
    )


def dense_tactics(request: LoweringRequest, dense: Dense) -> tuple[Tactic, ...]:
    """Return the candidates of a dense decode launch, the default first."""
    if dense.rows <= TOKENS_PER_TILE:
        shared_out = ({"many": 1},) if dense.storage.scaled and dense.rows > 1 else ()
        return (*streaming_tactics(request, dense), *shared_out)
    many = many_tokens(request, dense)
    if many is None:
        return (*streaming_tactics(request, dense)[:3], {"many": 1})
    if many.panels and dense.storage.scaled:
        return ({}, {"panels": 0})
    if many.panels:
        few = {"loads": _FEW_PANEL_LOADS}
        other = many_tokens(replace(request, tactic=few), dense)
        fewer = (few,) if other is not None and other.cut != many.cut else ()
        whole = ({"many": 0},) if dense.rows <= MAX_PASS_ROWS else ()
        return ({}, *whole, {"panels": 0}, *fewer)
    few = {"loads": _FEW_STEPS * dense.storage.loads}
    by_panels = ({"panels": 1},) if _by_panels(request, dense) else ()
    return ({}, {"many": 0}, few, *by_panels)


def ready_tokens(
    dense: Dense, many: ManyTokens, *, eps: float = 0.0, rounding: str = "gpt_oss"
) -> OpLaunch:
    """Return the launch that writes the tokens of ``dense`` to ``workspace_tokens``."""
    if dense.normed:
        return normed_tokens(
            dense, many.token_tiles, eps=eps, rounding=rounding, panels=many.panels
        )
    columns = many.token_tiles * TOKENS_PER_TILE
    constants = (("K_BLOCKS", dense.blocks), ("COLUMNS", columns))
    pieces = -(-dense.rows // TOKENS_PER_TILE) * -(-dense.blocks // _PANEL_BLOCKS)
    return OpLaunch(
        Kernel("linear", "token_panels", constants, file="token_panels.cu"),
        grid=(-(-pieces // _TOKEN_WARPS), 1, 1),
        block=_TOKEN_WARPS * 32,
        shared_bytes=0,
        arguments=("x", TOKENS, dense.rows),
    )


def normed_tokens(
    dense: Dense,
    token_tiles: int,
    *,
    eps: float,
    rounding: str,
    panels: bool,
    gathered: bool = False,
) -> OpLaunch:
    """Return the launch that normalizes the tokens of ``dense`` to ``workspace_tokens``.

    With ``panels`` the results are panels of ``token_tiles`` groups of 8, else fragments. With
    ``gathered`` the tokens are the rows ``logit_rows`` of ``x``.
    """
    blocks, rows, slices = dense.blocks, dense.rows, dense.slices
    shared_bytes = dense.fragment_bytes(1) + norm_bytes(blocks, 1)
    constants = (
        ("K_BLOCKS", blocks),
        ("SLICES", slices),
        ("TOKEN_TILES", token_tiles),
        ("TOKENS", _NORMED_TOKENS),
        ("PANELS", int(panels)),
        ("NORM_ROUNDING", rounding_code(rounding)),
        ("HAS_ROWS", int(gathered)),
        ("EPS", eps),
        ("SHARED_BYTES", shared_bytes),
    )
    return OpLaunch(
        Kernel("linear", "normed_tokens", constants, file="normed_tokens.cu"),
        grid=(-(-rows // _NORMED_TOKENS), 1, 1),
        block=slices * 32,
        shared_bytes=shared_bytes,
        arguments=("x", "logit_rows" if gathered else None, "norm", TOKENS, rows),
    )
