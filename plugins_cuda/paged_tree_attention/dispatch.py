"""Which kernels attend: one table, of which the first rule that takes a launch decides.

Sizes are the engine's, never those of a run. All forms for decoding give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.dispatch import Rule, first_rule
from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.paged_tree_attention.geometry import (
    WGMMA_WIDTHS,
    WIDE,
    WIDEST_OF_MANY,
    Geometry,
    geometry_of,
)
from specbuild.plugins_cuda.paged_tree_attention.prefill import WIDEST, has_full_rows
from specbuild.plugins_cuda.paged_tree_attention.split_per_warp import (
    SplitPerWarp,
    most_teams,
    split_per_warp,
)
from specbuild.plugins_cuda.paged_tree_attention.splits import WIDEST_UNSPLIT_WINDOW, splits_of

WGMMA_TEXT = " or ".join(map(str, WGMMA_WIDTHS)) + ", in bf16"
# Rows of a sequence, and slots of a view, from which on many_rows.cu is the quicker one. With
# several rows it is so behind long contexts only: all sequences' views have so many splits
# together, and each has more than tactics are measured with. Views of a KV head's own, SpecPV's
# partial ones, hold some thousand tokens however long their tables are.
MANY_ROWS, FEWEST_SLOTS_OF_A_VIEW = 12, 8192
SEVERAL_ROWS, FEWEST_SLOTS_OF_ALL_VIEWS = 5, 65536
# Of sequences and KV heads: so many are shared out by their lengths.
MANY_GROUPS = 64
# Slots of a view up to which few sequences' tactics are measured: 16384 tokens, capacity for a
# tree. Engines for longer contexts have no tactics: what is quicker up to here was slower at
# 131072.
MEASURED_CAPACITY = 16384 + 1024


@dataclass(frozen=True)
class Facts:
    """What the table is asked of a launch.

    ``splits``: of the context, more than one where a view spans several chunks. ``own``: how teams
    with splits of their own do it, None where they are not to, or do not fit.
    """

    shape: Geometry
    splits: int
    prompt: bool
    has_lists: bool
    own: SplitPerWarp | None

    @property
    def is_partial(self) -> bool:
        """Whether it attends to one sequence's partial views."""
        return self.shape.views > 1 and self.shape.batch == 1

    @property
    def may_be_many(self) -> bool:
        """Whether many_rows.cu is able to do it."""
        return self.shape.takes_wgmma and not self.shape.window and self.splits > 1


def is_long(shape: Geometry) -> bool:
    """Whether contexts are longer than tactics are measured with."""
    return shape.capacity > MEASURED_CAPACITY


def has_few_rows(shape: Geometry) -> bool:
    """Whether sequences have one row or two."""
    return shape.rows <= 2 * shape.batch


def _needs_shared_columns(facts: Facts) -> bool:
    """Whether only the kernel of the widest heads takes it; with lists it says why not."""
    widest_of_prompts = WIDEST if facts.prompt and not facts.has_lists else WIDEST_OF_MANY
    return facts.shape.width > widest_of_prompts


def _is_full_prompt(facts: Facts) -> bool:
    return facts.prompt and has_full_rows(facts.shape)


def _has_many_rows(facts: Facts) -> bool:
    shape = facts.shape
    enough = shape.most_rows >= MANY_ROWS and shape.capacity >= FEWEST_SLOTS_OF_A_VIEW
    return facts.may_be_many and enough


def _has_several_rows(facts: Facts) -> bool:
    shape = facts.shape
    long = is_long(shape) and shape.batch * shape.capacity >= FEWEST_SLOTS_OF_ALL_VIEWS
    # Of wide heads the plain kernel's two warps of a tile are as quick as long as they hold all.
    fewest = SEVERAL_ROWS if shape.width <= WIDE else max(SEVERAL_ROWS, 2 * shape.mma_rows + 1)
    several = fewest <= shape.most_rows < MANY_ROWS
    return facts.may_be_many and several and long and not facts.is_partial


TABLE: tuple[Rule[Facts], ...] = (
    Rule(
        "wide",
        ("wide_heads.cu",),
        "the sums of a head do not fit into the registers of a warp: eight warps share its columns",
        _needs_shared_columns,
        width="512, and 256 outside of prefill chunks, in bf16",
    ),
    Rule(
        "prompt",
        ("prefill_full.cu",),
        "16 rows share tiles of 128 keys, or 64 with wide heads; `wgmma` reads the "
        "operands from shared memory. With up to 4 query heads per KV head, 32 rows "
        "do",
        _is_full_prompt,
        rows="prefill chunk",
        context="no window",
        width=WGMMA_TEXT,
    ),
    Rule(
        "prompt",
        ("prefill.cu",),
        "16 rows, or 8 with wide heads, share tiles of 64 keys, because a window can "
        "end inside a tile. With up to 4 query heads per KV head, twice as many do",
        lambda facts: facts.prompt,
        rows="prefill chunk",
    ),
    Rule(
        "listed",
        ("whole_rows.cu", "selected.cu"),
        "rows that attend to everything share tiles; the slots of a list are not "
        "contiguous, so each row gathers its own. For single rows the second kernel "
        "does both",
        lambda facts: facts.has_lists,
        rows="with lists (DSA)",
        context="no window",
    ),
    Rule(
        "many",
        ("few_rows.cu", "many_rows.cu", "join_slots.cu"),
        "the keys of a split are read once for 8, 16 or 32 rows. The first kernel "
        "handles sequences with up to 8 rows in the same launch",
        _has_many_rows,
        rows=f"at least {MANY_ROWS} per sequence",
        context="no window",
        width=WGMMA_TEXT,
        pages=f"views of at least {FEWEST_SLOTS_OF_A_VIEW} slots",
    ),
    Rule(
        "many",
        ("many_rows.cu", "join_slots.cu"),
        "reading keys once outweighs the second launch only for long contexts, not "
        "for partial views",
        _has_several_rows,
        rows=f"at least {SEVERAL_ROWS} per sequence; 9 with heads of 128 and up to 4 per KV head",
        context=f"no window; engines for more than {MEASURED_CAPACITY - 1024} tokens",
        width=WGMMA_TEXT,
        pages=f"at least {FEWEST_SLOTS_OF_ALL_VIEWS} slots in all views; no partial views of one "
        "sequence",
    ),
    Rule(
        "split_per_warp",
        ("split_per_warp.cu",),
        "CTAs compute their share from the lengths of all sequences, so short "
        "sequences leave no CTA idle. Wider heads and large trees do not fit into "
        "shared memory",
        lambda facts: facts.own is not None,
        rows=f"{MANY_GROUPS} sequences × KV heads, or by a tactic; with one or two rows and fp8 "
        "caches, at most the number of multiprocessors",
        context=f"engines for up to {MEASURED_CAPACITY - 1024} tokens; several chunks",
        width="16, 32, 64 or 128",
    ),
    Rule(
        "whole",
        ("kernel.cu",),
        "one CTA processes all visible keys of a row: they span few chunks, so no "
        "states need to be joined",
        lambda facts: facts.splits == 1,
        context=f"a window up to {WIDEST_UNSPLIT_WINDOW}, or one chunk",
    ),
    Rule(
        "split",
        ("kernel.cu",),
        "a grid of fixed size distributes the splits over the GPU: fastest for one sequence",
        lambda _: True,
    ),
)


def facts_of(request: LoweringRequest) -> Facts:
    """What the table is asked of a request; SpecbuildError for sizes that no kernel has."""
    shape = geometry_of(request)
    splits = splits_of(shape)[1]
    has_lists = "selected" in request.tensors
    prompt = request.phase == "prefill"
    own = None if prompt or has_lists else own_splits(request, shape, splits)
    return Facts(shape, splits, prompt, has_lists, own)


def rule_of(request: LoweringRequest) -> Rule[Facts]:
    """The rule that decides for a request."""
    return first_rule(TABLE, facts_of(request))


def own_splits(request: LoweringRequest, shape: Geometry, splits: int) -> SplitPerWarp | None:
    """How teams with splits of their own do this launch, None where others do."""
    groups = shape.batch * shape.kv_heads
    # Half of the teams are for two CTAs of a multiprocessor: of wide heads and a row each they fit.
    halves = has_few_rows(shape) if shape.width <= WIDE else shape.most_rows == 1
    crowded = halves and groups > request.target.multiprocessors
    most = most_teams(shape)
    # Codes take more arithmetic than these have warps for: kernel.cu has more.
    halved = 0 if shape.codes else most // 2
    usual = 0 if groups < MANY_GROUPS else halved if crowded else most
    teams = request.tactic.get("split_teams", usual)
    if teams == 0 or splits == 1 or shape.uneven or is_long(shape):
        return None
    # Fewer teams have fewer tiles under way: three each, where that fits.
    depths = (3, 2) if shape.width > WIDE else (2,)
    if "stages" in request.tactic:
        depths = (request.tactic["stages"],)
    cuts = (split_per_warp(request, shape, teams, depth) for depth in depths)
    return next((cut for cut in cuts if cut is not None), None)
