"""PagedTreeAttention on a GPU: how a launch is cut over rows, KV heads and the context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

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
from specbuild.plugins_cuda.paged_tree_attention import many_rows
from specbuild.plugins_cuda.paged_tree_attention.geometry import (
    ARGUMENTS,
    FLAG_BYTES,
    HEADS,
    TILE_KEYS,
    Geometry,
    geometry_of,
    tile_bytes,
)
from specbuild.plugins_cuda.paged_tree_attention.prefill import lower_prefill
from specbuild.plugins_cuda.paged_tree_attention.selected import (
    STAGES as STAGES_OF_A_LIST,
)
from specbuild.plugins_cuda.paged_tree_attention.selected import (
    refusal,
    with_lists,
)
from specbuild.plugins_cuda.paged_tree_attention.split_per_warp import (
    MOST_TEAMS,
    SplitPerWarp,
    split_per_warp,
    split_per_warp_launch,
)

TILE_RUNS = 4  # of a split, each a team's
CHUNK_KEYS = TILE_RUNS * TILE_KEYS

# Splits of the context: a constant of the layer, since a row's sums are taken split by split. A CTA
# per split and KV head is to fill the GPU. A short window spans few chunks, which one CTA takes.
MOST_SPLITS, FEWEST_SPLITS = 32, 16
CTAS_WANTED = 128
WIDEST_UNSPLIT_WINDOW = 1024
# Of sequences and KV heads: so many are shared out by their lengths (split_per_warp.py).
MANY_GROUPS = 64
# Slots of a view up to which few sequences' tactics are measured: 16384 tokens, capacity for a
# tree. Engines for longer contexts have no tactics: what is quicker up to here was slower at
# 131072.
MEASURED_CAPACITY = 16384 + 1024

CTAS_OF_AN_SM = 2  # of one warp a team; registers allow no more
MOST_ROWS_ALONE = 4  # of a warp that shares its keys with none
MOST_ROWS_OF_A_WARP = 6  # of two that share theirs; registers bound both
# Where a split is shared: more CTAs than fit level what contexts of different lengths cost.
MOST_CTAS = 1024


@dataclass(frozen=True)
class Cut:
    """How one launch is cut; ``rows`` are those of a warp.

    ``pairs_at_once``: how many pairs of a warp's rows have their states in shared memory together.
    """

    split: int
    splits: int
    context_ctas: int
    rows: int
    row_warps: int
    row_ctas: int
    stages: int
    pairs_at_once: int = 1

    def shared_bytes(self, shape: Geometry) -> int:
        """Ring and states of the warps; several rows share queries and a copy of the tree too."""
        tiles = tile_bytes(
            teams=TILE_RUNS, stages=self.stages, rows=self.rows, row_warps=self.row_warps,
            width=shape.width, words=shape.words,
        )  # fmt: skip
        rows = self.row_warps * min(self.rows, 2) * self.pairs_at_once
        states = rows * TILE_RUNS * HEADS * (4 * (shape.width + 8) + 8)
        return tiles + states + FLAG_BYTES

    def grid(self, shape: Geometry) -> tuple[int, int, int]:
        """CTAs of the launch."""
        return (self.context_ctas * self.row_ctas, shape.kv_heads, shape.batch)

    @property
    def ctas_of_an_sm(self) -> int:
        """How many CTAs the registers of a multiprocessor are to hold."""
        return CTAS_OF_AN_SM if self.row_warps == 1 else 1

    def launch_bytes(self, shape: Geometry, target: Target) -> int:
        """What the launch asks for. Windows' few short CTAs leave multiprocessors to others."""
        needed = self.shared_bytes(shape)
        if self.split == 1:
            return needed
        return target.shared_bytes_to_ask_for(prod(self.grid(shape)), needed)

    def runs_at_once(self, shape: Geometry, target: Target) -> bool:
        """Whether the GPU holds all CTAs of the launch together."""
        shared = self.shared_bytes(shape)
        ctas = self.ctas_of_an_sm if target.two_fit(shared) else 1
        fits = shared <= target.shared_bytes_per_block
        return fits and prod(self.grid(shape)) <= ctas * target.multiprocessors


def lower(request: LoweringRequest) -> Lowering:
    """One launch, more where rows have lists or are many; SpecbuildError for what no kernel does.

    In phase ``decode`` a row's sums do not depend on the grid that is chosen here.
    """
    if request.phase == "prefill":
        return lower_prefill(request)
    shape = geometry_of(request)
    cut = _cut(request, shape)
    if "selected" not in request.tensors:
        if many_rows.takes(shape, cut.splits, is_long=_is_long(shape)):
            usual = replace(shape, rows=MOST_ROWS_ALONE * shape.batch, uneven=False)
            plain = _lowered(request, shape, _cut(request, usual))
            processors = request.target.multiprocessors
            return many_rows.with_many(shape, plain, cut.split, cut.splits, processors)
        own = _split_per_warp(request, shape, cut.splits)
        if own is not None:
            launch = split_per_warp_launch(request, shape, own, cut.split, cut.splits)
            return Lowering((launch,), _workspaces(shape, cut.splits))
        return _lowered(request, shape, cut)
    plain = _lowered(request, shape, cut)
    require(refusal(request))
    single = replace(cut, rows=1, row_warps=1, row_ctas=1, stages=STAGES_OF_A_LIST)
    [alone] = _lowered(request, shape, single).launches
    return with_lists(request, shape, plain, alone=alone, splits=cut.splits)


def _lowered(request: LoweringRequest, shape: Geometry, cut: Cut) -> Lowering:
    """The launch of a cut over everything that rows see."""
    every_pair = replace(cut, pairs_at_once=-(-cut.rows // 2))
    if every_pair.runs_at_once(shape, request.target):
        cut = every_pair
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
        ("SLOT_TEAMS", 0),
        ("PAIRS_AT_ONCE", cut.pairs_at_once),
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
    """The states of the splits; none where there is one alone."""
    if splits == 1:
        return ()
    states = shape.rows * shape.kv_heads * splits * shape.group
    return (
        Workspace("workspace_arrivals", 4 * shape.rows * shape.kv_heads, zeroed=True),
        Workspace("workspace_sums", 8 * states),
        Workspace("workspace_values", 4 * states * shape.width),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Depths of the pipeline, CTAs over the context, teams with splits of their own; the default
    first."""
    if request.phase == "prefill" or "selected" in request.tensors:
        return ({},)
    shape = geometry_of(request)
    if shape.window and _split(shape) == 1:
        return ({}, {"stages": 3})
    splits = _cut(request, shape).splits
    if many_rows.takes(shape, splits, is_long=_is_long(shape)):
        return ({},)
    # Half of the teams leave space for a second CTA where rows are few.
    sizes = (MOST_TEAMS, MOST_TEAMS // 2) if _are_few_rows(shape) else (MOST_TEAMS,)
    own: list[Tactic] = [{"slot_teams": n, "stages": stages} for n in sizes for stages in (2, 3)]
    own = [t for t in own if _split_per_warp(replace(request, tactic=t), shape, splits)]
    shared: list[Tactic] = [{"stages": 2}, {"stages": 4}]
    if not _is_long(shape):
        shared += [{"context_ctas": 4}, {"context_ctas": 8}]
    shared = [{"slot_teams": 0, **tactic} for tactic in shared]
    return ({}, *own, *shared)


def _is_long(shape: Geometry) -> bool:
    return shape.capacity > MEASURED_CAPACITY


def _are_few_rows(shape: Geometry) -> bool:
    return shape.rows <= 2 * shape.batch


def _split_per_warp(request: LoweringRequest, shape: Geometry, splits: int) -> SplitPerWarp | None:
    """How teams with splits of their own do this launch, None where others do."""
    groups = shape.batch * shape.kv_heads
    crowded = _are_few_rows(shape) and groups > request.target.multiprocessors
    usual = 0 if groups < MANY_GROUPS else MOST_TEAMS // 2 if crowded else MOST_TEAMS
    teams = request.tactic.get("slot_teams", usual)
    if teams == 0 or splits == 1 or shape.uneven or _is_long(shape):
        return None
    return split_per_warp(request, shape, teams, request.tactic.get("stages", 2))


def _split(shape: Geometry) -> int:
    if 0 < shape.window <= WIDEST_UNSPLIT_WINDOW:
        return 1
    wanted = _power_of_two(CTAS_WANTED // shape.kv_heads)
    return max(FEWEST_SPLITS, min(wanted, MOST_SPLITS))


def _cut(request: LoweringRequest, shape: Geometry) -> Cut:
    """The cut that a tactic asks for, or the one that suits the number of sequences and rows."""
    split = _split(shape)
    splits = min(split, -(-shape.capacity // CHUNK_KEYS))
    sequence_rows = -(-shape.rows // shape.batch)
    if split > 1:
        rows, row_warps = _rows_of_a_cta(sequence_rows, shape.width)
    else:
        rows, row_warps = _rows_of_a_window(request.target, shape, sequence_rows), 1
    limit = request.target.shared_bytes_per_block
    while True:
        row_ctas = -(-sequence_rows // (rows * row_warps))
        groups = shape.batch * shape.kv_heads * row_ctas
        # Where one sequence has most rows its CTAs alone have work.
        spread = row_ctas > 1 or shape.uneven
        usual = splits if spread else max(1, MOST_CTAS // groups)
        context_ctas = _power_of_two(min(request.tactic.get("context_ctas", usual), splits))
        crowded = groups * context_ctas > request.target.multiprocessors
        stages = 2 if split == 1 or (crowded and rows * row_warps > 1 and row_warps == 1) else 3
        stages = request.tactic.get("stages", stages)
        cut = Cut(split, splits, context_ctas, rows, row_warps, row_ctas, stages)
        while cut.stages > 2 and cut.shared_bytes(shape) > limit:
            cut = replace(cut, stages=cut.stages - 1)
        if cut.shared_bytes(shape) <= limit:
            return cut
        rows, row_warps = 1, 1  # such a tree is gathered row by row


def _rows_of_a_cta(rows: int, width: int) -> tuple[int, int]:
    """Rows of a warp, and warps that share a tile: (1, 2, 4 or 6; 1 or 2)."""
    if rows <= 2:
        return rows, 1
    alone = MOST_ROWS_ALONE if width <= 64 else MOST_ROWS_ALONE // 2
    if rows <= alone:
        return alone, 1
    most = MOST_ROWS_OF_A_WARP if width <= 64 else MOST_ROWS_OF_A_WARP // 3
    ctas = -(-rows // (2 * most))
    return min(most, 2 * -(-rows // (4 * ctas))), 2


def _rows_of_a_window(target: Target, shape: Geometry, rows: int) -> int:
    """Rows of a warp where keys are few: it is quicker to read them again than to wait for other
    rows, as long as all CTAs run at once."""
    if rows == 1:
        return 1
    most = MOST_ROWS_ALONE if shape.width <= 64 else MOST_ROWS_ALONE // 2
    ctas = max(1, CTAS_OF_AN_SM * target.multiprocessors // (shape.batch * shape.kv_heads))
    return min(most, max(2, -(-rows // ctas)))


def _power_of_two(value: int) -> int:
    """The greatest one that is not above."""
    return 1 << (max(1, value).bit_length() - 1)
