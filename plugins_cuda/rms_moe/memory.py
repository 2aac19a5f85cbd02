"""Shared memory of RmsMoe's expert kernels when decoding: what fits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specbuild.plugins_cuda.launches import Tactic, Target
from specbuild.plugins_cuda.rms_moe.packing import (
    STAGE_STEPS,
    STEP_BYTES,
)

# Dynamic shared memory begins at a multiple of this, behind the static one.
DYNAMIC_ALIGNMENT = 1024
STAGE_BYTES = STEP_BYTES * (STAGE_STEPS + 1)
STATIC_BYTES = 48 * 1024
# More h than this is gathered item by item, where a CTA's units are of few items.
MAX_RESIDENT_H = 48 * 1024


@dataclass(frozen=True)
class Sizes:
    """Sizes of one request: rows T of the bucket, sequences B, and the layer's geometry.

    ``bf16``: whether experts are stored so, in place of MXFP4. ``slices``: warps that share K of a
    tile of gate/up, each with a run of whole stages.
    """

    rows: int
    sequences: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    bf16: bool = False
    slices: int = 1

    @property
    def entries(self) -> int:
        """Chosen experts of all rows."""
        return self.rows * self.top_k

    def items(self, pass_rows: int) -> int:
        """The most items, each up to ``pass_rows`` rows of one expert."""
        return min(self.experts, self.entries) + self.entries // pass_rows

    def routing_ints(self, pass_rows: int) -> int:
        """Size of a CTA's lists: items, entries, the items' number and cost, and who takes whom."""
        takers = -(-self.rows // 32) * 32 * -(-self.experts // 32)
        return 4 * self.items(pass_rows) + self.entries + 4 + takers

    def slice_floats(self, tactic: ExpertTactic) -> int:
        """Size of the sums that warps of gate/up leave for the first of each team."""
        columns = -(-min(tactic.pass_rows, self.rows) // 8)
        teams = tactic.warps // self.slices
        return (self.slices - 1) * teams * tactic.tiles * columns * 4 * 32


@dataclass(frozen=True)
class SharedLayout:
    """Memory of an expert kernel: static, dynamic, and whether it holds all entries' rows.

    Where it does not, it has places for those of an item, or of several that fit.
    """

    static: int
    dynamic: int
    rows_resident: bool
    places: int


@dataclass(frozen=True)
class ExpertTactic:
    """How one of the two expert kernels runs.

    ``warps`` of a CTA, ``stages`` of a warp's ring, ``pieces`` of a stage, ``pass_rows``: rows of
    an expert that one pass over its weights serves, ``tiles``: neighbouring tiles that a warp takes
    together.
    """

    warps: int
    stages: int
    pieces: int
    pass_rows: int
    tiles: int

    @property
    def barriers(self) -> int:
        """One for each piece of each stage of each ring."""
        return self.warps * self.stages * self.pieces

    @property
    def ring_bytes(self) -> int:
        """Bytes of all rings."""
        return self.warps * self.stages * self.tiles * STAGE_BYTES


# What a tactic calls them, for gate/up and for down.
GATE_UP_KEYS = tuple(field.name for field in fields(ExpertTactic))
DOWN_KEYS = tuple(f"down_{name}" for name in GATE_UP_KEYS)


def gate_up_tactic(tactic: Tactic) -> ExpertTactic:
    """Gate/up's part of a tactic."""
    return ExpertTactic(*(tactic[name] for name in GATE_UP_KEYS))


def down_tactic(tactic: Tactic) -> ExpertTactic:
    """Down's part of a tactic."""
    return ExpertTactic(*(tactic[name] for name in DOWN_KEYS))


def lay_out_gate_up(sizes: Sizes, tactic: ExpertTactic, target: Target) -> SharedLayout | None:
    """None where the tactic does not fit."""
    if tactic.warps % sizes.slices:
        return None
    static = _static(sizes, tactic, floats=sizes.slice_floats(tactic))
    return _lay_out(target, static, tactic, _row_bytes(sizes.hidden), sizes.rows, sizes.rows, None)


def lay_out_down(sizes: Sizes, tactic: ExpertTactic, target: Target) -> SharedLayout | None:
    """None where the tactic does not fit."""
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
    """Rings and rows: all ``held_rows`` where they fit, else as many as do, an item's at least."""
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
    """Shared memory beside the dynamic one: routing, barriers, and shares or sums."""
    nbytes = 4 * (sizes.routing_ints(tactic.pass_rows) + floats) + 8 * tactic.barriers + 64
    return -(-nbytes // DYNAMIC_ALIGNMENT) * DYNAMIC_ALIGNMENT


def _row_bytes(columns: int) -> int:
    return -(-2 * columns // 128) * 128 + 64
