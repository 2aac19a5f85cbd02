"""PagedTreeAttention on a GPU: the grid of a launch over rows, KV heads and the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from specbuild.plugins_cuda.dispatch import first_rule
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Target,
    Workspace,
    require,
)
from specbuild.plugins_cuda.paged_tree_attention.dispatch import (
    TABLE,
    Facts,
    facts_of,
    has_few_rows,
    is_long,
    own_splits,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import (
    ARGUMENTS,
    FLAG_BYTES,
    HEADS,
    WIDE,
    Geometry,
    tile_bytes,
)
from specbuild.plugins_cuda.paged_tree_attention.many_rows import with_many
from specbuild.plugins_cuda.paged_tree_attention.prefill import lower_prefill
from specbuild.plugins_cuda.paged_tree_attention.selected import (
    STAGES as STAGES_OF_A_LIST,
)
from specbuild.plugins_cuda.paged_tree_attention.selected import (
    refusal,
    with_lists,
)
from specbuild.plugins_cuda.paged_tree_attention.split_per_warp import (
    max_teams,
    split_per_warp_launch,
)
from specbuild.plugins_cuda.paged_tree_attention.splits import (
    TILE_RUNS,
    power_of_two,
    splits_of,
)
from specbuild.plugins_cuda.paged_tree_attention.wide_heads import lower_wide

USUAL_ROWS = 4  # of sequences in a launch with uneven numbers of rows
CTAS_OF_AN_SM = 2  # if a team has one warp; registers allow no more
# The m16 tiles of a warp that does not share its keys, of one of two warps that do, and the rows of
# the latter. Registers limit both numbers of tiles, lanes the rows. Wide heads leave space for one
# tile.
MAX_ALONE, MAX_OF_A_WARP, MAX_ROWS_OF_A_WARP = 2, 3, 8
# If a split is shared: more CTAs than fit balance contexts of different lengths.
MAX_CTAS, MAX_CTAS_IN_CODES = 1024, 2048


@dataclass(frozen=True)
class Cut:
    """The grid of one launch; ``rows`` are those of a warp.

    ``halves_at_once``: the number of halves of a warp's m16 tiles whose states are in shared memory
    at the same time.
    """

    split: int
    splits: int
    context_ctas: int
    rows: int
    row_warps: int
    row_ctas: int
    stages: int
    halves_at_once: int

    def shared_bytes(self, shape: Geometry) -> int:
        """Return the bytes of rings and states; several rows also share queries and the tree."""
        tiles = tile_bytes(
            shape, teams=TILE_RUNS, stages=self.stages, rows=self.rows, row_warps=self.row_warps
        )
        halves = self.row_warps * self.halves_at_once
        states = halves * TILE_RUNS * HEADS * (4 * (shape.width + 8) + 8)
        return tiles + states + FLAG_BYTES

    def grid(self, shape: Geometry) -> tuple[int, int, int]:
        """Return the grid."""
        return (self.context_ctas * self.row_ctas, shape.kv_heads, shape.batch)

    @property
    def ctas_of_an_sm(self) -> int:
        """The CTAs for which the registers of a multiprocessor should suffice."""
        return CTAS_OF_AN_SM if self.row_warps == 1 else 1

    def launch_bytes(self, shape: Geometry, target: Target) -> int:
        """Return the requested shared memory.

        The few short CTAs of a window leave multiprocessors to other launches.
        """
        needed = self.shared_bytes(shape)
        if self.split == 1:
            return needed
        return target.requested_shared_bytes(prod(self.grid(shape)), needed)

    def runs_at_once(self, shape: Geometry, target: Target) -> bool:
        """Return whether all CTAs of the launch fit on the GPU at the same time."""
        shared = self.shared_bytes(shape)
        ctas = self.ctas_of_an_sm if target.fits_twice(shared) else 1
        fits = shared <= target.shared_bytes_per_block
        return fits and prod(self.grid(shape)) <= ctas * target.multiprocessors


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches: one, or more if rows have lists or are many.

    Raises SpecbuildError for unsupported requests. In phase ``decode`` a row's sums do not depend
    on the grid.
    """
    facts = facts_of(request)
    return _FORMS[first_rule(TABLE, facts).form](request, facts)


def _lower_prompt(request: LoweringRequest, _: Facts) -> Lowering:
    return lower_prefill(request)


def _lower_listed(request: LoweringRequest, facts: Facts) -> Lowering:
    shape, cut = facts.shape, _cut(request, facts.shape)
    plain = _lowered(request, shape, cut)
    require(refusal(request))
    single = replace(
        cut, rows=1, row_warps=1, row_ctas=1, stages=STAGES_OF_A_LIST, halves_at_once=1
    )
    [alone] = _lowered(request, shape, single).launches
    return with_lists(request, shape, plain, alone=alone, splits=cut.splits)


def _lower_many(request: LoweringRequest, facts: Facts) -> Lowering:
    shape, cut = facts.shape, _cut(request, facts.shape)
    typical = replace(shape, rows=USUAL_ROWS * shape.batch, uneven=False)
    plain = _lowered(request, shape, _cut(request, typical))
    return with_many(shape, plain, cut.split, cut.splits, request.target.multiprocessors)


def _lower_split_per_warp(request: LoweringRequest, facts: Facts) -> Lowering:
    shape, own = facts.shape, facts.own
    assert own is not None
    split, splits = splits_of(shape)
    launch = split_per_warp_launch(request, shape, own, split, splits)
    return Lowering((launch,), _workspaces(shape, splits))


def _lower_plain(request: LoweringRequest, facts: Facts) -> Lowering:
    return _lowered(request, facts.shape, _cut(request, facts.shape))


def _lower_wide(request: LoweringRequest, facts: Facts) -> Lowering:
    return lower_wide(request, facts.shape)


_FORMS: Mapping[str, Callable[[LoweringRequest, Facts], Lowering]] = {
    "wide": _lower_wide,
    "prompt": _lower_prompt,
    "listed": _lower_listed,
    "many": _lower_many,
    "split_per_warp": _lower_split_per_warp,
    "whole": _lower_plain,
    "split": _lower_plain,
}


def _lowered(request: LoweringRequest, shape: Geometry, cut: Cut) -> Lowering:
    """Return the launch of a grid for rows without lists."""
    all_halves = replace(cut, halves_at_once=shape.halves(cut.rows))
    if all_halves.runs_at_once(shape, request.target):
        cut = all_halves
    shares_rows = cut.context_ctas > 1 and cut.rows * cut.row_warps > 1
    meets = shares_rows and cut.runs_at_once(shape, request.target)
    constants = (
        *shape.constants(),
        ("SPLIT", cut.split),
        ("SLOTS", cut.splits),
        ("CONTEXT_CTAS", cut.context_ctas),
        ("ROWS", cut.rows),
        ("ROW_WARPS", cut.row_warps),
        ("ROW_CTAS", cut.row_ctas),
        ("STAGES", cut.stages),
        ("SPLIT_TEAMS", 0),
        ("HALVES_AT_ONCE", cut.halves_at_once),
        ("MEETS", int(meets)),
        ("CTAS_OF_AN_SM", cut.ctas_of_an_sm),
        ("LAUNCH_ROWS", shape.rows),
        ("SEQUENCE_ROWS", max(1, shape.rows // shape.batch)),
        ("SHARED_BYTES", cut.shared_bytes(shape)),
    )
    workspaces = _workspaces(shape, cut.splits)
    entry = "attend_split" if cut.splits > 1 else "attend_whole"
    launch = OpLaunch(
        Kernel("paged_tree_attention", entry, constants),
        grid=cut.grid(shape),
        block=32 * TILE_RUNS * cut.row_warps,
        shared_bytes=cut.launch_bytes(shape, request.target),
        arguments=(*ARGUMENTS, *(workspace.name for workspace in workspaces)),
        reads_early=True,
    )
    return Lowering((launch,), workspaces)


def _workspaces(shape: Geometry, splits: int) -> tuple[Workspace, ...]:
    """Return the workspaces of the states of splits; none for a single split."""
    if splits == 1:
        return ()
    states = shape.rows * shape.kv_heads * splits * shape.group
    return (
        Workspace("workspace_arrivals", 4 * shape.rows * shape.kv_heads, zeroed=True),
        Workspace("workspace_sums", 8 * states),
        Workspace("workspace_values", 4 * states * shape.width),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics, the default first.

    They vary the stages of the ring, the CTAs over the context, split_per_warp.cu, and the rows of
    a warp.
    """
    if request.phase == "prefill" or "selected" in request.tensors:
        return ({},)
    facts = facts_of(request)
    shape, splits = facts.shape, facts.splits
    if first_rule(TABLE, facts).form == "wide":
        return ({},)
    if shape.window and splits_of(shape)[0] == 1:
        # With few heads per KV head, one row of wide heads needs more registers than two.
        # A launch of a few prompts can have fewer rows than the batch.
        wide = shape.width > WIDE and shape.rows <= shape.batch
        return ({}, {"stages": 3}, *(({"rows": 2},) if wide else ()))
    if first_rule(TABLE, facts).form == "many":
        return ({},)
    # With few rows, half of the teams leave space for a second CTA.
    teams = max_teams(shape)
    sizes = (teams, teams // 2) if has_few_rows(shape) else (teams,)
    own: list[Tactic] = [{"split_teams": n, "stages": stages} for n in sizes for stages in (2, 3)]
    own = [t for t in own if own_splits(replace(request, tactic=t), shape, splits)]
    shared: list[Tactic] = [{"stages": 2}, {"stages": 4}]
    if not is_long(shape):
        shared += [{"context_ctas": 4}, {"context_ctas": 8}]
    shared = [{"split_teams": 0, **tactic} for tactic in shared]
    return ({}, *own, *shared)


def _cut(request: LoweringRequest, shape: Geometry) -> Cut:
    """Return the grid of the tactic, or the default for the number of sequences and rows."""
    split, splits = splits_of(shape)
    sequence_rows = -(-shape.rows // shape.batch)
    if split > 1:
        rows, row_warps = _rows_of_a_cta(shape, sequence_rows)
    else:
        default_rows = _rows_of_a_window(request.target, shape, sequence_rows)
        rows, row_warps = request.tactic.get("rows", default_rows), 1
    limit = request.target.shared_bytes_per_block
    while True:
        row_ctas = -(-sequence_rows // (rows * row_warps))
        groups = shape.batch * shape.kv_heads * row_ctas
        # If one sequence has most rows, only its CTAs have work.
        spread = row_ctas > 1 or shape.uneven
        max_ctas = MAX_CTAS_IN_CODES if shape.codes else MAX_CTAS
        default = splits if spread else max(1, max_ctas // groups)
        context_ctas = power_of_two(min(request.tactic.get("context_ctas", default), splits))
        crowded = groups * context_ctas > request.target.multiprocessors
        stages = 2 if split == 1 or (crowded and rows * row_warps > 1 and row_warps == 1) else 3
        stages = request.tactic.get("stages", stages)
        halves = min(2, shape.halves(rows))
        cut = Cut(split, splits, context_ctas, rows, row_warps, row_ctas, stages, halves)
        while cut.stages > 2 and cut.shared_bytes(shape) > limit:
            cut = replace(cut, stages=cut.stages - 1)
        if shape.width > WIDE and cut.shared_bytes(shape) > limit:
            cut = replace(cut, halves_at_once=1)
        if cut.shared_bytes(shape) <= limit:
            return cut
        rows, row_warps = 1, 1  # the tree's keys are gathered for each row


def _rows_of_a_cta(shape: Geometry, rows: int) -> tuple[int, int]:
    """Return the rows of a warp (1, 2 or full m16 tiles) and the warps that share a tile."""
    if rows <= 2:
        return rows, 1
    mma, wide = shape.mma_rows, shape.width > WIDE
    if rows <= mma * (1 if wide else MAX_ALONE):
        return mma * shape.mmas(rows), 1
    max_rows = mma if wide else min(mma * MAX_OF_A_WARP, MAX_ROWS_OF_A_WARP)
    ctas = -(-rows // (2 * max_rows))
    return min(max_rows, mma * -(-rows // (2 * mma * ctas))), 2


def _rows_of_a_window(target: Target, shape: Geometry, rows: int) -> int:
    """Return the rows of a warp for a window.

    With few keys, reading them again is faster than waiting for other rows, as long as all CTAs run
    at the same time.
    """
    if rows == 1:
        return 1
    max_rows = shape.mma_rows * (MAX_ALONE if shape.width <= WIDE else 1)
    ctas = max(1, CTAS_OF_AN_SM * target.multiprocessors // (shape.batch * shape.kv_heads))
    return min(max_rows, max(2, -(-rows // ctas)))
