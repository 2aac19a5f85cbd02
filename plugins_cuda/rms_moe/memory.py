"""Shared memory of RmsMoe's expert kernels when decoding: what fits, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import Tactic, Target
from specbuild.plugins_cuda.rms_moe.packing import (
    STAGE_STEPS,
    STEP_BYTES,
    TILE_OUTPUTS,
    down_steps,
    stage_count,
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

    def owned_tiles(self, target: Target) -> int:
        """The most tiles of the down projection that one CTA owns."""
        return -(-self.hidden // (TILE_OUTPUTS * target.multiprocessors))


@dataclass(frozen=True)
class SharedPlan:
    """Memory of an expert kernel: static, dynamic, and whether it holds all entries' rows.

    Where it does not, it holds the rows of one item at a time. ``slots``: stages of the down
    projection under way in a CTA that owns its rows.
    """

    static: int
    dynamic: int
    rows_resident: bool
    slots: int = 0

    @property
    def total(self) -> int:
        """Both parts."""
        return self.static + self.dynamic


def plan_gate_up(sizes: Sizes, tactic: Tactic, target: Target) -> SharedPlan | None:
    """None where the tactic does not fit."""
    static = _static(sizes, tactic, tactic["warps"] * tactic["stages"], weights=0)
    rings = tactic["warps"] * tactic["stages"] * STAGE_BYTES
    row = _row_bytes(sizes.hidden)
    room = target.shared_bytes_per_block - static
    item_rows = min(tactic["pass_rows"], sizes.rows)
    resident = rings + sizes.rows * row <= room
    needed = rings + (sizes.rows if resident else item_rows) * row
    dynamic = max(needed, _alone(target) - static)
    return _fitting(SharedPlan(static, dynamic, resident), room)


def plan_down(
    sizes: Sizes, tactic: Tactic, target: Target, gate_up: SharedPlan
) -> SharedPlan | None:
    """None where the tactic does not fit.

    With ``beside`` a CTA fits on a multiprocessor together with one of gate/up, so that its
    weights are on their way early; gate/up alone keeps a second CTA of either away.
    """
    if tactic["spread"]:
        barriers = tactic["down_warps"] * tactic["stages"]
    else:
        stages = stage_count(down_steps(sizes.inner))
        barriers = sizes.items(tactic["pass_rows"]) * sizes.owned_tiles(target) * stages
    static = _static(sizes, tactic, barriers, weights=sizes.entries)
    room, least = target.shared_bytes_per_block - static, _alone(target) - static
    if tactic["beside"]:
        room, least = room - gate_up.total - RESERVED_BYTES, 0
    row = _row_bytes(sizes.inner)
    if tactic["spread"]:
        rings = tactic["down_warps"] * tactic["stages"] * STAGE_BYTES
        item_rows = min(tactic["pass_rows"], sizes.rows)
        resident = sizes.entries * row <= min(MOST_RESIDENT_H, room - rings)
        needed = rings + (sizes.entries if resident else item_rows) * row
        return _fitting(SharedPlan(static, max(needed, least), resident), room)
    partial = 4 * sizes.entries * TILE_OUTPUTS * sizes.owned_tiles(target)
    rest = sizes.entries * row + partial
    slots = min((room - rest) // STAGE_BYTES, barriers)
    if slots < min(tactic["down_warps"], barriers):
        return None
    dynamic = max(slots * STAGE_BYTES + rest, least)
    return _fitting(SharedPlan(static, dynamic, rows_resident=True, slots=slots), room)


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
