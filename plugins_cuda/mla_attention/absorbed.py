"""Absorbed queries on a GPU. A work item is a split of a row for 64 heads."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    OpLaunch,
    Target,
    Unsupported,
    Workspace,
)
from specbuild.plugins_cuda.mla_attention.geometry import ABSORBED_HEADS, PANEL, LatentGeometry

THREADS = 384
STAGES = 2
PARTS, HALVES = 2, 2  # of a tile and of its weights, with a barrier each
PROJECT_THREADS = 1024
# The maximum of scratch memory besides a head's weights: sums of splits by sixteen groups of
# threads, and weights of splits.
PROJECT_SCRATCH_BYTES = 36 << 10
# States that a thread loads at once, by the CTAs that share a multiprocessor. A CTA is alone if the
# launch has at most one per multiprocessor. Otherwise two share one, to keep it busy. Two CTAs have
# 32 registers per thread, which would spill with four states.
MAX_AHEAD = {1: 9, 2: 3}
# Columns of a value whose weights a CTA holds. In prefill a warp holds 16 columns, and a CTA
# processes PROMPT_ROWS rows.
MAX_COLUMNS, PROMPT_THREADS, PROMPT_ROWS = 128, 256, 256
_VALUE_ARGUMENTS = (
    *("w_v", "b_v", "row_start", "sinks", "attended"),
    *("workspace_sums", "workspace_values"),
)
# A prompt chunk is refused if the states between its two launches would exceed this.
MAX_PROMPT_STATE_BYTES = 512 << 20

# Tiles of a split, by the tiles that a row attends to. They are constants, because the order of a
# row's sums depends on them. A split has a state of 2 · value bytes per head, as much as a tile. A
# long context has only as many splits as one row needs to fill the GPU. The splits of a short one
# are long enough to be worth their state.
SHORT_CONTEXT, SHORT_SPLIT, LONG_SPLIT, MAX_SPLITS = 160, 4, 8, 132
# The states of a launch stay in L2 until its second kernel reads them, if the cache entries are
# evicted first. This applies if no other row or CTA reads the entries again.
BYTES_TO_KEEP = 16 << 20


@dataclass(frozen=True)
class AbsorbedCut:
    """The division of a row's context into splits (latent_splits.cuh)."""

    short_context: int
    short_split: int
    long_split: int
    max_splits: int
    places: int


def absorbed_cut(shape: LatentGeometry, *, prompt: bool) -> AbsorbedCut:
    """Return the cut of a layer.

    Prompt rows fill the GPU by their number and have one split each.
    """
    if prompt:
        return AbsorbedCut(0, 1, 1, 1, 1)
    places = absorbed_places(shape)
    return AbsorbedCut(SHORT_CONTEXT, SHORT_SPLIT, LONG_SPLIT, MAX_SPLITS, places)


def absorbed_places(shape: LatentGeometry) -> int:
    """Return the maximum of splits that a row of this layer has in decoding."""
    tiles = -(-shape.capacity // shape.tile)
    if shape.window:
        tiles = min(tiles, -(-(shape.window - 1) // shape.tile) + 1)
    short = -(-min(tiles, SHORT_CONTEXT) // SHORT_SPLIT)
    return max(short, min(MAX_SPLITS, -(-tiles // LONG_SPLIT) if tiles > SHORT_CONTEXT else 0))


def lower_absorbed(
    shape: LatentGeometry, target: Target, arguments: tuple[str, ...], *, prompt: bool
) -> Lowering:
    """Return two launches: a state per split, row and head; then states are merged to values."""
    cut = absorbed_cut(shape, prompt=prompt)
    states = shape.rows * shape.q_heads * cut.places
    launches = (
        _attend(shape, cut, target, arguments),
        _project_prompt(shape) if prompt else _project(shape, cut.places, target),
    )
    workspaces = (
        Workspace("workspace_sums", 16 * states),
        Workspace("workspace_values", _state_bytes(shape, cut.places)),
        Workspace("workspace_counts", 4 * shape.rows),
    )
    return Lowering(launches, workspaces)


def absorbed_refusal(shape: LatentGeometry) -> Unsupported | None:
    """Return a refusal if a prompt chunk has too many rows."""
    needed = _state_bytes(shape, absorbed_cut(shape, prompt=True).places)
    if needed <= MAX_PROMPT_STATE_BYTES:
        return None
    return Unsupported(
        f"MlaAttention: a prompt's chunk of {shape.rows} rows and {shape.q_heads} heads leaves "
        f"{needed >> 20} MiB of sums, at most {MAX_PROMPT_STATE_BYTES >> 20} are for that: take "
        "fewer rows at a time."
    )


def _value_constants(shape: LatentGeometry, places: int) -> tuple[tuple[str, int], ...]:
    """Return the constants of both kernels that compute values."""
    return (
        ("BATCH", shape.batch),
        ("Q_HEADS", shape.q_heads),
        ("V_HEADS", shape.v_heads),
        ("V_WIDTH", shape.v_width),
        ("COLUMNS", _columns(shape)),
        ("VALUE", shape.value),
        ("PLACES", places),
        ("HAS_SINKS", int(shape.has_sinks)),
        ("HAS_BIAS", int(shape.has_value_bias)),
    )


def _project(shape: LatentGeometry, places: int, target: Target) -> OpLaunch:
    """Return the launch that merges splits and computes values, a row and head per CTA."""
    fits = target.fits_twice(_weight_bytes(shape) + PROJECT_SCRATCH_BYTES)
    ctas = 2 if fits and shape.rows * shape.q_heads > target.multiprocessors else 1
    constants = (
        *_value_constants(shape, places),
        ("CTAS_OF_AN_SM", ctas),
        ("AHEAD", MAX_AHEAD[ctas]),
        ("SHARED_BYTES", _weight_bytes(shape)),
    )
    return OpLaunch(
        Kernel("mla_attention", "project_absorbed", constants, file="absorbed_values.cu"),
        grid=(shape.q_heads, shape.rows, shape.v_width // _columns(shape)),
        block=PROJECT_THREADS,
        shared_bytes=_weight_bytes(shape),
        arguments=(*_VALUE_ARGUMENTS, "workspace_counts"),
    )


def _project_prompt(shape: LatentGeometry) -> OpLaunch:
    """Return the launch that computes values of single splits, 16 rows of a head at a time."""
    constants = (*_value_constants(shape, 1), ("PROMPT_ROWS", PROMPT_ROWS))
    return OpLaunch(
        Kernel("mla_attention", "project_prompt", constants, file="prompt_values.cu"),
        grid=(shape.q_heads, -(-shape.rows // PROMPT_ROWS), shape.v_width // _columns(shape)),
        block=PROMPT_THREADS,
        shared_bytes=0,
        arguments=(*_VALUE_ARGUMENTS, shape.rows),
    )


def _columns(shape: LatentGeometry) -> int:
    """Return the columns of a value whose weights a CTA holds."""
    return min(shape.v_width, MAX_COLUMNS)


def _state_bytes(shape: LatentGeometry, places: int) -> int:
    """Return the bytes of the sums of all splits, rows and heads."""
    return 64 * shape.rows * shape.q_heads * places * -(-shape.value // 32)


def _keeps_states(shape: LatentGeometry, places: int) -> bool:
    alone = shape.rows <= shape.batch and shape.head_groups == 1
    return alone and _state_bytes(shape, places) <= BYTES_TO_KEEP


def _weight_bytes(shape: LatentGeometry) -> int:
    """Return the bytes of a head's weights, or of ``MAX_COLUMNS`` of its columns.

    Every thread copies 16 bytes of as many rows as the CTA copies at once.
    """
    rows = PROJECT_THREADS // (_columns(shape) // 8)
    return -(-shape.value // rows) * PROJECT_THREADS * 16


def _attend(
    shape: LatentGeometry, cut: AbsorbedCut, target: Target, arguments: tuple[str, ...]
) -> OpLaunch:
    constants = (
        *shape.walk_constants(),
        ("VALUE", shape.value),
        ("Q_HEADS", shape.q_heads),
        ("SCALE", shape.scale),
        ("BATCH", shape.batch),
        ("ROWS", 1),
        ("LISTED", 0),
        ("PLACES", cut.places),
        ("SHORT_CONTEXT", cut.short_context),
        ("SHORT_SPLIT", cut.short_split),
        ("LONG_SPLIT", cut.long_split),
        ("MAX_SPLITS", cut.max_splits),
        ("EVICT_FIRST", int(_keeps_states(shape, cut.places))),
        ("LAUNCH_ROWS", shape.rows),
        ("SHARED_BYTES", absorbed_shared_bytes(shape)),
    )
    return OpLaunch(
        # Entries with an incomplete panel need more registers in the copying warpgroup.
        Kernel(
            "mla_attention",
            "attend_absorbed",
            constants,
            file="absorbed.cu",
            hot=shape.entry % PANEL == 0,
        ),
        grid=(_ctas(shape, cut.places, target), shape.head_groups, 1),
        block=THREADS,
        shared_bytes=absorbed_shared_bytes(shape),
        arguments=("q", "c_pool", *arguments, "workspace_counts"),
        reads_early=True,
    )


def _ctas(shape: LatentGeometry, places: int, target: Target) -> int:
    """Return the CTAs of the items: one per SM, such that a CTA gets the same row of a sequence
    again.

    It then has the queries of the row already.
    """
    ctas = max(1, target.multiprocessors // shape.head_groups)
    sequence_rows = max(1, shape.rows // shape.batch)
    if sequence_rows <= ctas // 2:
        ctas -= ctas % sequence_rows
    return min(ctas, shape.rows * places)


def absorbed_shared_bytes(shape: LatentGeometry) -> int:
    """Return the shared memory of absorbed_memory.cuh.

    It has tiles, queries and weights; factors, bases and totals; barriers; the first items of
    sequences.
    """
    panels = -(-shape.entry // PANEL)
    queries = (panels + 1) * ABSORBED_HEADS * 2 * PANEL
    barriers = 2 * STAGES * PARTS + 2 * HALVES + 2
    small = 4 * 6 * ABSORBED_HEADS + 8 * barriers + 4 * (shape.batch + 1)
    return STAGES * shape.stage_bytes + queries + small
