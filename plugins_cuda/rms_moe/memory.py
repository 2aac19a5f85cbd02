"""Shared memory of RmsMoe's expert kernels when decoding: what fits."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import Tactic, Target
from specbuild.plugins_cuda.rms_moe.packing import (
    STAGE_STEPS,
    STEP_BYTES,
)

# What the hardware takes of a multiprocessor's memory for every CTA.
RESERVED_BYTES = 1024
# Dynamic shared memory begins at a multiple of this, behind the static one.
DYNAMIC_ALIGNMENT = 1024
STAGE_BYTES = STEP_BYTES * (STAGE_STEPS + 1)
STATIC_BYTES = 48 * 1024
# Up to so many rows every CTA lists the experts' rows itself (Routing in expert_routing.cuh).
MOST_ROWS_LISTED_BY_READERS = 32
# More h than this is gathered item by item, where a CTA's units are of few items.
MOST_RESIDENT_H = 48 * 1024


@dataclass(frozen=True)
class Sizes:
    """Sizes of one request: rows T of the bucket, sequences B, and the layer's geometry."""

    rows: int
    sequences: int
    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def entries(self) -> int:
        """Chosen experts of all rows."""
        return self.rows * self.top_k

    def items(self, pass_rows: int) -> int:
        """The most items, each up to ``pass_rows`` rows of one expert."""
        return min(self.experts, self.entries) + self.entries // pass_rows

    def routing_ints(self, pass_rows: int) -> int:
        """Size of the router's lists."""
        return 4 + 4 * self.items(pass_rows) + self.entries


@dataclass(frozen=True)
class SharedPlan:
    """Memory of an expert kernel: static, dynamic, and whether it holds all entries' rows.

    Where it does not, it has places for those of an item, or of several that fit.
    """

    static: int
    dynamic: int
    rows_resident: bool
    places: int


def plan_gate_up(sizes: Sizes, tactic: Tactic, target: Target) -> SharedPlan | None:
    """None where the tactic does not fit."""
    static = _static(sizes, tactic, tactic["warps"] * tactic["stages"], weights=0)
    rings = tactic["warps"] * tactic["stages"] * STAGE_BYTES
    pass_rows = min(tactic["pass_rows"], sizes.rows)
    return _plan(target, static, rings, _row_bytes(sizes.hidden), sizes.rows, pass_rows, None)


def plan_down(sizes: Sizes, tactic: Tactic, target: Target) -> SharedPlan | None:
    """None where the tactic does not fit."""
    barriers = tactic["down_warps"] * tactic["stages"]
    static = _static(sizes, tactic, barriers, weights=sizes.entries)
    rings, row = barriers * STAGE_BYTES, _row_bytes(sizes.inner)
    pass_rows = min(tactic["pass_rows"], sizes.rows)
    return _plan(target, static, rings, row, sizes.entries, pass_rows, MOST_RESIDENT_H)


def _plan(
    target: Target,
    static: int,
    rings: int,
    row_bytes: int,
    rows: int,
    item_rows: int,
    most_resident: int | None,
) -> SharedPlan | None:
    """Rings and rows: all of them where they fit, else as many as do, an item's at least."""
    room = target.shared_bytes_per_block - static
    places = min(rows, (room - rings) // row_bytes)
    resident = places == rows and rows * row_bytes <= (most_resident or room)
    if not resident and places < item_rows:
        return None
    dynamic = max(rings + places * row_bytes, _alone(target) - static)
    return _fitting(SharedPlan(static, dynamic, resident, places), room)


def _fitting(plan: SharedPlan, room: int) -> SharedPlan | None:
    return plan if plan.dynamic <= room and plan.static <= STATIC_BYTES else None


def _alone(target: Target) -> int:
    """The least memory, static and dynamic, of which a multiprocessor has no two.

    Two CTAs of an expert kernel on one multiprocessor make a launch that starts early slower.
    """
    half = (target.shared_bytes_per_block + RESERVED_BYTES) // 2
    return half - RESERVED_BYTES + 256


def _static(sizes: Sizes, tactic: Tactic, barriers: int, weights: int) -> int:
    """Shared memory beside the dynamic one: routing, shares of the experts, barriers."""
    listing = sizes.rows if sizes.rows <= MOST_ROWS_LISTED_BY_READERS else 1
    sets = 4 * listing * -(-sizes.experts // 32)
    nbytes = 4 * sizes.routing_ints(tactic["pass_rows"]) + sets + 4 * weights + 8 * barriers + 64
    return -(-nbytes // DYNAMIC_ALIGNMENT) * DYNAMIC_ALIGNMENT


def _row_bytes(columns: int) -> int:
    return -(-2 * columns // 128) * 128 + 64
