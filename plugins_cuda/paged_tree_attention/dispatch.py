"""The dispatch table of attention: the first rule that matches a launch selects its kernels.

Sizes are those of the engine, never those of a run. All decoding kernels return the same bits.
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
    max_teams,
    split_per_warp,
)
from specbuild.plugins_cuda.paged_tree_attention.splits import WIDEST_UNSPLIT_WINDOW, splits_of

WGMMA_TEXT = " or ".join(map(str, WGMMA_WIDTHS)) + ", in bf16"
# The rows of a sequence, and the slots of a view, from which many_rows.cu is faster. With several
# rows this applies to long contexts only: the views of all sequences together have so many slots,
# and each is longer than the tuned range. Separate views of KV heads, such as SpecPV's partial
# views, hold some thousand tokens, regardless of the length of their tables.
MANY_ROWS, FEWEST_SLOTS_OF_A_VIEW = 12, 8192
SEVERAL_ROWS, FEWEST_SLOTS_OF_ALL_VIEWS = 5, 65536
# Sequences × KV heads from which splits are distributed by context length.
MANY_GROUPS = 64
# The slots of a view up to which tactics of few sequences are tuned: 16384 tokens and capacity for
# a tree. Engines for longer contexts have no tactics, because those that are faster up to here were
# slower at 131072.
MEASURED_CAPACITY = 16384 + 1024


@dataclass(frozen=True)
class Facts:
    """The facts of a launch that the table tests.

    ``splits`` is the number of splits of the context: more than one if a view has several chunks.
    ``own`` is the cut of split_per_warp.cu, or None if it does not apply or does not fit.
    """

    shape: Geometry
    splits: int
    prompt: bool
    has_lists: bool
    own: SplitPerWarp | None

    @property
    def is_partial(self) -> bool:
        """Whether it attends to partial views of one sequence."""
        return self.shape.views > 1 and self.shape.batch == 1

    @property
    def may_be_many(self) -> bool:
        """Whether many_rows.cu supports it."""
        return self.shape.takes_wgmma and not self.shape.window and self.splits > 1


def is_long(shape: Geometry) -> bool:
    """Return whether contexts are longer than the tuned range."""
    return shape.capacity > MEASURED_CAPACITY


def has_few_rows(shape: Geometry) -> bool:
    """Return whether sequences have one or two rows."""
    return shape.rows <= 2 * shape.batch


def _needs_shared_columns(facts: Facts) -> bool:
    """Whether only the kernel of the widest heads takes it; with lists it says why not."""
    widest_of_prompts = WIDEST if facts.prompt and not facts.has_lists else WIDEST_OF_MANY
    return facts.shape.width > widest_of_prompts


def _is_full_prompt(facts: Facts) -> bool:
    return facts.prompt and has_full_rows(facts.shape)


def _has_many_rows(facts: Facts) -> bool:
    shape = facts.shape
    enough = shape.max_rows >= MANY_ROWS and shape.capacity >= FEWEST_SLOTS_OF_A_VIEW
    return facts.may_be_many and enough


def _has_several_rows(facts: Facts) -> bool:
    shape = facts.shape
    long = is_long(shape) and shape.batch * shape.capacity >= FEWEST_SLOTS_OF_ALL_VIEWS
    # With wide heads, the plain kernel's two warps of a tile are as fast while they hold all rows.
    fewest = SEVERAL_ROWS if shape.width <= WIDE else max(SEVERAL_ROWS, 2 * shape.mma_rows + 1)
    several = fewest <= shape.max_rows < MANY_ROWS
    return facts.may_be_many and several and long and not facts.is_partial


TABLE: tuple[Rule[Facts], ...] = (
    Rule(
        "wide",
        ("wide_heads.cu",),
        "the sums of a head do not fit into the registers of a warp: 16 warps share its columns",
        _needs_shared_columns,
        width="512, and 256 outside of prefill chunks, in bf16",
    ),
    Rule(
        "prompt",
        ("prefill_full.cu",),
        "16 rows share tiles of 128 keys, fewer with wider heads; `wgmma` reads the "
        "operands from shared memory. With up to 4 query heads per KV head, 32 rows "
        "do",
        _is_full_prompt,
        rows="prefill chunk",
        context="no window",
        width="64, 128 or 256, in bf16",
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
    """Return the facts of a request; SpecbuildError for unsupported sizes."""
    shape = geometry_of(request)
    splits = splits_of(shape)[1]
    has_lists = "selected" in request.tensors
    prompt = request.phase == "prefill"
    own = None if prompt or has_lists else own_splits(request, shape, splits)
    return Facts(shape, splits, prompt, has_lists, own)


def rule_of(request: LoweringRequest) -> Rule[Facts]:
    """Return the rule that matches a request."""
    return first_rule(TABLE, facts_of(request))


def own_splits(request: LoweringRequest, shape: Geometry, splits: int) -> SplitPerWarp | None:
    """Return the cut of split_per_warp.cu for this launch, or None if another kernel applies."""
    groups = shape.batch * shape.kv_heads
    # Half of the teams allow two CTAs per multiprocessor: with wide heads, for one row each.
    halves = has_few_rows(shape) if shape.width <= WIDE else shape.max_rows == 1
    crowded = halves and groups > request.target.multiprocessors
    full = max_teams(shape)
    # Quantized caches need more arithmetic than these warps provide: kernel.cu has more warps.
    halved = 0 if shape.codes else full // 2
    default = 0 if groups < MANY_GROUPS else halved if crowded else full
    teams = request.tactic.get("split_teams", default)
    if teams == 0 or splits == 1 or shape.uneven or is_long(shape):
        return None
    # Fewer teams have fewer tiles in flight, so each has three if they fit.
    depths = (3, 2) if shape.width > WIDE else (2,)
    if "stages" in request.tactic:
        depths = (request.tactic["stages"],)
    cuts = (split_per_warp(request, shape, teams, depth) for depth in depths)
    return next((cut for cut in cuts if cut is not None), None)
