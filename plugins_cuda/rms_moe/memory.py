"""Shared memory of RmsMoe's expert kernels for decoding, and the tactics that fit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specbuild.plugins_cuda.launches import Tactic, Target
from specbuild.plugins_cuda.rms_moe.packing import (
    STAGE_STEPS,
    STEP_BYTES,
)

# The alignment of dynamic shared memory, which follows the static part.
DYNAMIC_ALIGNMENT = 1024
STAGE_BYTES = STEP_BYTES * (STAGE_STEPS + 1)
STATIC_BYTES = 48 * 1024
# With a larger h, a CTA gathers rows item by item, because its units are of few items.
MAX_RESIDENT_H = 48 * 1024


@dataclass(frozen=True)
class Sizes:
    """Sizes of one request: rows T of the bucket, sequences B, and the layer's geometry.

    ``slices``: warps that share K of a tile of gate/up, each with a run of whole stages.
    """

    rows: int
    sequences: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    slices: int = 1

    @property
    def entries(self) -> int:
        """The number of chosen experts of all rows."""
        return self.rows * self.top_k

    def items(self, pass_rows: int) -> int:
        """Return the maximum of items, each up to ``pass_rows`` rows of one expert."""
        return min(self.experts, self.entries) + self.entries // pass_rows

    def routing_ints(self, pass_rows: int) -> int:
        """Return the size of a CTA's lists.

        These are items, entries, the number and cost of items, and the experts of each row as bits.
        """
        takers = -(-self.rows // 32) * 32 * -(-self.experts // 32)
        return 4 * self.items(pass_rows) + self.entries + 4 + takers

    def slice_floats(self, tactic: ExpertTactic) -> int:
        """Return the size of the sums that warps of gate/up pass to the first warp of a team."""
        columns = -(-min(tactic.pass_rows, self.rows) // 8)
        teams = tactic.warps // self.slices
        return (self.slices - 1) * teams * tactic.tiles * columns * 4 * 32


@dataclass(frozen=True)
class SharedLayout:
    """Memory of an expert kernel: static and dynamic bytes, and whether it holds all entries' rows.

    If it does not, ``places`` is the number of rows that it holds: those of one or several items.
    """

    static: int
    dynamic: int
    rows_resident: bool
    places: int


@dataclass(frozen=True)
class ExpertTactic:
    """The parameters of one of the two expert kernels.

    A CTA has ``warps``, a warp's ring ``stages``, a stage ``pieces``. ``pass_rows`` is the number
    of rows of an expert that share one pass over its weights. ``tiles`` is the number of adjacent
    tiles that a warp processes together.
    """

    warps: int
    stages: int
    pieces: int
    pass_rows: int
    tiles: int

    @property
    def barriers(self) -> int:
        """The number of barriers: one per piece, stage and ring."""
        return self.warps * self.stages * self.pieces

    @property
    def ring_bytes(self) -> int:
        """The bytes of all rings."""
        return self.warps * self.stages * self.tiles * STAGE_BYTES


# The names of these parameters in a tactic, for gate/up and for down.
GATE_UP_KEYS = tuple(field.name for field in fields(ExpertTactic))
DOWN_KEYS = tuple(f"down_{name}" for name in GATE_UP_KEYS)


def gate_up_tactic(tactic: Tactic) -> ExpertTactic:
    """Return gate/up's part of a tactic."""
    return ExpertTactic(*(tactic[name] for name in GATE_UP_KEYS))


def down_tactic(tactic: Tactic) -> ExpertTactic:
    """Return down's part of a tactic."""
    return ExpertTactic(*(tactic[name] for name in DOWN_KEYS))


def lay_out_gate_up(sizes: Sizes, tactic: ExpertTactic, target: Target) -> SharedLayout | None:
    """Return the layout, or None if the tactic does not fit."""
    if tactic.warps % sizes.slices:
        return None
    static = _static(sizes, tactic, floats=sizes.slice_floats(tactic))
    return _lay_out(target, static, tactic, _row_bytes(sizes.hidden), sizes.rows, sizes.rows, None)


def lay_out_down(sizes: Sizes, tactic: ExpertTactic, target: Target) -> SharedLayout | None:
    """Return the layout, or None if the tactic does not fit."""
    static, row = _static(sizes, tactic, floats=sizes.entries), _row_bytes(sizes.inner)
    return _lay_out(target, static, tactic, row, sizes.entries, sizes.rows, MAX_RESIDENT_H)


def _lay_out(
    target: Target,
    static: int,
    tactic: ExpertTactic,
    row_bytes: int,
    held_rows: int,
    rows: int,
    most_resident: int | None,
) -> SharedLayout | None:
    """Return rings and rows: all ``held_rows`` if they fit, else at least those of an item."""
    shared_bytes = target.shared_bytes_per_block - static
    rings = tactic.ring_bytes
    places = min(held_rows, (shared_bytes - rings) // row_bytes)
    resident = places == held_rows and held_rows * row_bytes <= (most_resident or shared_bytes)
    if not resident and places < min(tactic.pass_rows, rows):
        return None
    # Two CTAs on one multiprocessor make a launch that starts early slower.
    dynamic = max(rings + places * row_bytes, target.exclusive_shared_bytes - static)
    return _fitting(SharedLayout(static, dynamic, resident, places), shared_bytes)


def _fitting(layout: SharedLayout, shared_bytes: int) -> SharedLayout | None:
    return layout if layout.dynamic <= shared_bytes and layout.static <= STATIC_BYTES else None


def _static(sizes: Sizes, tactic: ExpertTactic, floats: int) -> int:
    """Return the bytes of static shared memory: routing, barriers, and shares or sums."""
    nbytes = 4 * (sizes.routing_ints(tactic.pass_rows) + floats) + 8 * tactic.barriers + 64
    return -(-nbytes // DYNAMIC_ALIGNMENT) * DYNAMIC_ALIGNMENT


def _row_bytes(columns: int) -> int:
    return -(-2 * columns // 128) * 128 + 64
