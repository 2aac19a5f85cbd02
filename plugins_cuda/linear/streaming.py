"""The launches of dense kernels for few tokens: warps over K, rows over CTAs, loads in flight.

``_device/small_linear.cuh`` describes the kernels. Of these sizes, only the number of K slices and
of their groups affects the bits of a result. Both depend on K only, so that the result of a row is
the same in every bucket.

The other sizes affect the speed. They are tactics:

- ``ctas``; ``unit``: pairs of weight rows that stay together; ``loads`` in flight in registers;
- ``ring``: whether as many steps as fit are in flight in shared memory too, or all steps of a
  quantized weight with few tokens (above 1: at least so many);
- ``rows``: whether few tokens are rows in shared memory, which are smaller than fragments;
- ``held``: whether the sums of all chunks of a CTA are added at once, if they fit;
- ``many``: whether the kernels of ``many_tokens.py`` are used, and ``panels``: whether with panels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from specbuild.plugins_cuda.launches import LoweringRequest, Tactic, Target
from specbuild.plugins_cuda.linear.slices import (
    MAX_ROUND,
    MIN_PLACES,
    group_slices_of,
    slices_of,
    whole_round,
)
from specbuild.plugins_cuda.linear.storage import BF16, INT4_SYMMETRIC, Storage
from specbuild.runtime.errors import SpecbuildError

MAX_ROWS = 256
STREAMING_KEYS = ("ctas", "unit", "loads", "ring", "rows", "held", "many", "panels")
TOKENS_PER_TILE = 8
PAIRS_PER_TILE = 8
_LOAD_BYTES, _FRAGMENT_BYTES = 512, 512
# Bytes of a token's sums of a tile.
_PARTIAL_BYTES = 64
# With so few tokens, only their sums are stored.
_FEW_TOKENS = 2
_ROW_BYTES = 64
# The alignment of the parts of shared memory.
_ALIGNMENT_BYTES = 128
# The maximum of fragments of tokens without a norm; beyond it, each warp reads its slice from L2.
_MAX_FRAGMENT_BYTES = 140 << 10
_MAX_TOKEN_TILES = 4
# Up to this number of rows, the weight is read in one pass.
MAX_PASS_ROWS = _MAX_TOKEN_TILES * TOKENS_PER_TILE
# Weight tiles that a warp processes at once, by groups of 8 tokens, within 128 registers.
_MAX_TILES = {1: 4, 2: 3, 4: 2}
# The same if a CTA has several chunks: fewer tiles leave more steps in flight.
_MAX_TILES_OF_CHUNKS = 2
# A slice of a 4-bit weight has few steps, so more tiles are in flight.
_MAX_TILES_OF_CODE_CHUNKS, _MAX_SCALE_WORDS_OF_TILES = 3, 3
# 16-byte loads of a lane in registers, by groups of 8 tokens: of weights if tokens are in shared
# memory, else of weights and tokens.
_LOADS_OF_WEIGHTS = {1: 18, 2: 12, 4: 8}
_LOADS_OF_BOTH = {1: 20, 2: 16, 4: 16}
# The same for weights that are decoded: scales and the decoder need registers too.
_LOADS_OF_CODES = {1: 18, 2: 12, 4: 6}
_LOADS_OF_CODES_AND_TOKENS = {1: 15, 2: 14, 4: 14}
# The same with a ring whose stages are refilled: addresses need registers too.
_MAX_LOADS_REFILLED = 12
# A candidate with fewer loads, because long slices of some widths have too few registers.
_FEW_LOADS_REFILLED = 10
# Steps of a quantized weight in shared memory: fewer than three do not overlap. Two are faster if
# all steps of a CTA follow normalized tokens at once. Whole rounds of four take 2 to 10 % less time
# than three steps, and longer ones more time, except those of INT4_SYMMETRIC.
_USUAL_PLACES, _MAX_USUAL_ROUND = 3, 4
# The switch in small_linear.cuh has cases for this number of steps in shared memory.
_MAX_RING = 5
# With few rows, O and QKV leave multiprocessors to small launches that run at the same time. This
# applies if no CTA gets more work, to at most one multiprocessor in 16: 4 of 132 for QKV, 8 for O.
# Their CTAs occupy a multiprocessor each. Without free ones, QKV would start late while the sum of
# the experts still runs, and O while attention still merges splits. Up to eight CTAs of the router
# start together with O. Measurements of single ops do not show this, so no tactic uses all
# multiprocessors.
_ONE_SPARE_OF = 16
_BESIDE_SMALL_LAUNCHES = ("Linear", "LinearPartial", "RmsQkvRope")
# Ops whose CTAs have so many chunks that separate additions cost time.
_HOLDING = ("RmsSwiglu",)


@dataclass(frozen=True)
class Streaming:
    """One dense launch without its entry point."""

    constants: tuple[tuple[str, int | float | str], ...]
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int


@dataclass(frozen=True)
class Dense:
    """A packed weight of ``tiles`` × ``blocks`` for ``rows`` tokens.

    ``normed``: the tokens are normalized before the product. ``unit``: pairs of weight rows that
    stay together. ``storage``: the format of the weight.
    """

    op: str
    tiles: int
    blocks: int
    rows: int
    normed: bool
    storage: Storage = BF16
    unit: int = 4

    @property
    def slices(self) -> int:
        """Warps that split K, by its number of blocks, so that every storage has the same order."""
        return slices_of(self.blocks)

    @property
    def slice_units(self) -> int:
        """Units of the weight in the longest slice."""
        return self.storage.units(self.slice_blocks)

    @property
    def slice_blocks(self) -> int:
        """Blocks of 32 columns in the longest slice."""
        return -(-self.blocks // self.slices)

    @property
    def group_slices(self) -> int:
        """Slices of K that are added before groups of them are."""
        return group_slices_of(self.slices, self.slice_blocks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.tiles * self.storage.units(self.blocks) * self.storage.unit_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the tokens, in bf16."""
        return self.rows * self.blocks * 64

    def fragment_bytes(self, token_tiles: int, rows: int = TOKENS_PER_TILE) -> int:
        """Return the shared memory of tokens as fragments, with ``rows`` rows per group of 8."""
        block = rows * _ROW_BYTES if rows < TOKENS_PER_TILE else token_tiles * _FRAGMENT_BYTES
        return self.slices * self.slice_blocks * block


def normed_bytes(columns: int) -> int:
    """Return the shared memory of ``NormedRows`` of a row: weight, sums of squares, the row."""
    weight = _round_up(2 * columns)
    sums = _round_up(-(-columns // 256) * 4)
    return weight + sums + weight + 64


def fragment_bytes(blocks: int, token_tiles: int) -> int:
    """Return the shared memory of ``TokenFragments``; every slice is as long as the longest."""
    slices = slices_of(blocks)
    return slices * -(-blocks // slices) * token_tiles * _FRAGMENT_BYTES


def norm_bytes(blocks: int, token_tiles: int) -> int:
    """Return the shared memory for the norm of fragments: its weight and sums of squares."""
    return _round_up(64 * blocks) + token_tiles * TOKENS_PER_TILE * 20 * 4


def require_decode_rows(op: str, rows: int) -> None:
    """Raise SpecbuildError for more rows than a decode launch may have."""
    if rows > MAX_ROWS:
        raise SpecbuildError(
            f"{op}: got {rows} rows in a decode launch, expected at most {MAX_ROWS}; use smaller "
            "buckets or the prefill phase"
        )


def require_tactic(op: str, tactic: Tactic, known: tuple[str, ...]) -> None:
    """Raise SpecbuildError if a tactic has unknown keys."""
    unknown = sorted(set(tactic) - set(known))
    if unknown:
        raise SpecbuildError(
            f"{op}: the tactic has unknown keys {', '.join(unknown)}, expected some of "
            f"{', '.join(known)}; measure tactics again with this version"
        )


def _usual_ring(dense: Dense, *, at_once: bool) -> int:
    """Return the steps in flight; ``at_once``: all of a CTA's follow its tokens."""
    least, steps = MIN_PLACES if at_once else _USUAL_PLACES, dense.slice_units
    if dense.storage is INT4_SYMMETRIC:
        whole = whole_round(steps, least, MAX_ROUND)
        return whole or whole_round(steps, MIN_PLACES, MAX_ROUND) or least
    return least if at_once else whole_round(steps, least, _MAX_USUAL_ROUND) or least


def deep_enough(steps: int, wanted: int) -> int:
    """Return the steps in flight: about ``wanted``, and a divisor of ``steps`` if one is near."""
    wanted = max(1, min(wanted, steps))
    even = max(depth for depth in range(1, wanted + 1) if steps % depth == 0)
    return even if 2 * even > wanted else wanted


def streaming(request: LoweringRequest, dense: Dense) -> Streaming:
    """Return the launch of warps that split K; SpecbuildError if it does not fit."""
    require_decode_rows(dense.op, dense.rows)
    require_tactic(dense.op, request.tactic, STREAMING_KEYS)
    for token_tiles in token_tiles_for(dense.rows):
        cut = _cut(dense, token_tiles, request.target, request.tactic)
        if cut is not None:
            return cut
    raise SpecbuildError(
        f"{dense.op}: {dense.blocks * 32} columns of {TOKENS_PER_TILE} normalized rows do not fit "
        f"in {request.target.shared_bytes_per_block} bytes of shared memory; build for the cpu "
        "backend"
    )


def streaming_tactics(request: LoweringRequest, dense: Dense) -> tuple[Tactic, ...]:
    """Return the candidates for a launch, the default first."""
    cut = dict(streaming(request, dense).constants)
    candidates: list[Tactic] = [{}]
    coded = dense.storage.scaled
    # A ring of a quantized weight holds steps, not loads.
    if dense.rows <= TOKENS_PER_TILE and not (coded and cut["RING"]):
        candidates.append({"loads": 9 if coded else 12})
    if cut["RING"] and not coded and int(cut["DEPTH"]) < dense.slice_units:
        candidates.append({"loads": _FEW_LOADS_REFILLED})
    if cut["FRAGMENTS"] and (cut["TOKEN_TILES"] == 1 if coded else cut["ONE_CHUNK"]):
        candidates.append({"ring": int(cut["RING"] == 0)})
    if coded and cut["RING"] and dense.slice_units % int(cut["RING"]):
        # Whole rounds: the compiler knows the stage of every step.
        more = range(int(cut["RING"]), MAX_ROUND + 1)
        candidates += [{"ring": n} for n in more if dense.slice_units % n == 0][:1]
    if dense.op in _HOLDING and not cut["ONE_CHUNK"]:
        candidates.append({"held": int(cut["HELD"] == 1)})
    if cut["TOKEN_ROWS"] != TOKENS_PER_TILE:
        candidates.append({"rows": 0})
    elif (coded or not cut["FRAGMENTS"]) and _rows_held(dense, 1) < TOKENS_PER_TILE:
        candidates.append({"rows": 1})
    # Single pairs, if complete units leave many CTAs idle at the end.
    pairs, ctas = dense.tiles * PAIRS_PER_TILE, int(cut["CTAS"])
    if -(-pairs // dense.unit // ctas) * dense.unit > 1.05 * pairs / ctas:
        candidates.append({"unit": 1})
    return tuple(candidates)


def token_tiles_for(rows: int) -> Iterator[int]:
    """Return the groups of 8 tokens that a launch may process at once, the most first."""
    tiles = 1
    while tiles < _MAX_TOKEN_TILES and tiles * TOKENS_PER_TILE < rows:
        tiles *= 2
    while tiles:
        yield tiles
        tiles //= 2


def _cut(dense: Dense, token_tiles: int, target: Target, tactic: Tactic) -> Streaming | None:
    storage, warps, steps = dense.storage, dense.slices, dense.slice_units
    passes = -(-dense.rows // (token_tiles * TOKENS_PER_TILE))
    unit = tactic.get("unit", _usual_unit(dense, target))
    units = dense.tiles * PAIRS_PER_TILE // unit
    usual_ctas = _usual_ctas(dense, target, units, unit)
    ctas = min(units, max(1, tactic.get("ctas", usual_ctas) // passes))
    span = _most_tiles_touched(units, ctas, unit)
    fragments = dense.normed or dense.fragment_bytes(token_tiles) <= _MAX_FRAGMENT_BYTES
    held_rows = TOKENS_PER_TILE
    if tactic.get("rows", int(storage.scaled and not fragments)):
        held_rows = _rows_held(dense, token_tiles)
        fragments = fragments or held_rows < TOKENS_PER_TILE
    token_bytes = dense.fragment_bytes(token_tiles, held_rows) if fragments else 0
    if dense.normed:
        token_bytes += norm_bytes(dense.blocks, token_tiles)
    usual = (
        (_LOADS_OF_CODES, _LOADS_OF_CODES_AND_TOKENS)
        if storage.scaled
        else (_LOADS_OF_WEIGHTS, _LOADS_OF_BOTH)
    )[not fragments][token_tiles]
    loads = tactic.get("loads", storage.held_loads(usual))
    # With few tokens, quantized weights are in flight in shared memory, if the tokens are there
    # too.
    places = fragments and storage.scaled and token_tiles == 1
    # The fewest chunks whose partial sums fit.
    most_tiles = _MAX_TILES[token_tiles]
    if span > most_tiles:
        few = storage.loads == 1 and storage.scale_words <= _MAX_SCALE_WORDS_OF_TILES
        few = few and not places and (token_tiles == 1 or not storage.heavy)
        most_tiles = _MAX_TILES_OF_CODE_CHUNKS if few else _MAX_TILES_OF_CHUNKS
    for max_tiles in range(most_tiles, 0, -1):
        chunks = -(-span // max_tiles)
        tiles = -(-span // chunks)
        slice_bytes = dense.fragment_bytes(token_tiles, held_rows) // dense.slices
        in_places = places and tactic.get("ring", 1)
        sums = _FEW_TOKENS if in_places and dense.rows <= _FEW_TOKENS else TOKENS_PER_TILE
        warp_bytes = tiles * token_tiles * sums * _PARTIAL_BYTES
        overlay = int(fragments and chunks == 1 and warp_bytes <= slice_bytes)
        partials = 0 if overlay else warps * warp_bytes
        left = target.shared_bytes_per_block - token_bytes - partials
        if left < 0:
            continue
        if in_places:
            ring_step = warps * tiles * storage.unit_bytes
            usual_ring = _usual_ring(dense, at_once=dense.normed and chunks == 1)
            depth = ring = min(left // ring_step, max(usual_ring, tactic.get("ring", 1)))
            if ring < MIN_PLACES:
                continue
        else:
            beside = 0 if fragments else storage.unit_blocks * token_tiles
            interleaved = fragments and chunks == 1 and not storage.scaled and tactic.get("ring", 1)
            ring_step = warps * tiles * storage.loads * _LOAD_BYTES
            depth, ring = _registers_and_ring(
                steps,
                loads,
                storage.loads * tiles + beside,
                left // ring_step if interleaved else None,
            )
        holds = dense.op in _HOLDING and tactic.get("held", int(storage.scaled))
        left -= ring * ring_step
        held = chunks if holds and (chunks - 1) * partials <= left else 1
        shared = token_bytes + held * partials + ring * ring_step
        constants = (
            ("K_BLOCKS", dense.blocks),
            ("TILE_COUNT", dense.tiles),
            ("WARPS", warps),
            ("SLICES", warps),
            ("GROUP_SLICES", dense.group_slices),
            ("WEIGHTS", storage.code),
            ("TILES", tiles),
            ("TOKEN_TILES", token_tiles),
            ("DEPTH", depth),
            ("RING", ring),
            ("PARTIAL_TOKENS", sums),
            ("CTAS", ctas),
            ("UNIT_PAIRS", unit),
            ("ONE_CHUNK", int(chunks == 1)),
            ("FRAGMENTS", int(fragments)),
            ("TOKEN_ROWS", held_rows),
            ("OVERLAY", overlay),
            ("HELD", held),
            ("SHARED_BYTES", shared),
        )
        return Streaming(constants, (ctas, passes, 1), warps * 32, shared)
    return None


def _registers_and_ring(
    steps: int, loads: int, a_step: int, most_ring: int | None
) -> tuple[int, int]:
    """Return the steps in flight, and how many of them are in a ring of at most ``most_ring``.

    None means no ring. It pays to have all steps of one chunk in flight. The steps of several
    chunks follow each other, and the loop around them uses the registers for a ring's addresses.
    """
    ring, in_registers = 0, max(1, loads // a_step)
    if most_ring is not None:
        ring = min(_MAX_RING, most_ring)
        if in_registers + ring < steps:
            in_registers = max(1, min(loads, _MAX_LOADS_REFILLED) // a_step)
    depth = deep_enough(steps, in_registers + ring)
    return depth, max(0, depth - in_registers)


def _rows_held(dense: Dense, token_tiles: int) -> int:
    """Return the rows per group in shared memory if fragments do not fit; 8 if rows do not fit."""
    rows = dense.rows
    few = token_tiles == 1 and rows < TOKENS_PER_TILE
    return rows if few and dense.fragment_bytes(1, rows) <= _MAX_FRAGMENT_BYTES else TOKENS_PER_TILE


def _usual_unit(dense: Dense, target: Target) -> int:
    """Return the default unit: complete tiles if no CTA gets more work, and if they save time.

    A CTA decodes a tile of a quantized weight completely, even if it uses only some of its rows.
    A CTA that starts within a tile touches one more tile, which can add a chunk if it has several.
    """
    units = dense.tiles * PAIRS_PER_TILE // dense.unit
    max_pairs = -(-units // target.multiprocessors) * dense.unit
    whole = -(-dense.tiles // target.multiprocessors) * PAIRS_PER_TILE
    saves = dense.storage.scaled or whole > PAIRS_PER_TILE * max(_MAX_TILES.values())
    return PAIRS_PER_TILE if saves and whole <= max_pairs else dense.unit


def _usual_ctas(dense: Dense, target: Target, units: int, unit: int) -> int:
    every = target.multiprocessors
    if dense.op not in _BESIDE_SMALL_LAUNCHES or dense.rows > TOKENS_PER_TILE:
        return every
    most_units = -(-units // every)
    few = max(every - every // _ONE_SPARE_OF, -(-units // most_units))
    # If the weight of fewer CTAs would be in more tiles, all CTAs are used.
    more = _most_tiles_touched(units, few, unit) > _most_tiles_touched(units, every, unit)
    return every if more else few


def _most_tiles_touched(units: int, ctas: int, unit: int) -> int:
    """Return the maximum of tiles with the pairs of one CTA."""
    starts = [units * cta // ctas * unit for cta in range(ctas + 1)]
    return max(
        -(-last // PAIRS_PER_TILE) - first // PAIRS_PER_TILE for first, last in pairwise(starts)
    )


def _round_up(value: int) -> int:
    return -(-value // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
