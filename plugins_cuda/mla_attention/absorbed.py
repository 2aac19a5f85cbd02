"""Absorbed queries on a GPU: items of a row's splits and 64 heads, CTA by CTA."""

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
PARTS, HALVES = 2, 2  # of a tile and of its weights, that arrive by themselves
PROJECT_THREADS = 1024
# At most, beside a head's weights: sums of splits by sixteen groups of threads, weights of splits.
PROJECT_SCRATCH_BYTES = 36 << 10
# Splits that a thread of it asks for at once, by CTAs that the registers of a multiprocessor hold:
# one where each has a multiprocessor to itself, two to keep it busy where they take turns. Two have
# 32 registers a thread, which spill with four splits.
MAX_AHEAD = {1: 9, 2: 3}
# Columns of a value that a CTA has the weights of. Over a prompt's chunk a warp holds 16, for so
# many rows.
MAX_COLUMNS, PROMPT_THREADS, PROMPT_ROWS = 128, 256, 256
_VALUE_ARGUMENTS = (
    *("w_v", "b_v", "row_start", "sinks", "attended"),
    *("workspace_sums", "workspace_values"),
)
# A chunk of a prompt is refused that would leave more than so much behind for its second launch.
MAX_PROMPT_STATE_BYTES = 512 << 20

# Tiles of a split, by the tiles that a row sees: constants, as a row's sums go split by split. A
# split leaves a state of 2 · value bytes a head, as much as a tile of it: a long context has no
# more splits than one row needs to fill the GPU, a short one splits that are worth their state.
SHORT_CONTEXT, SHORT_SPLIT, LONG_SPLIT, MAX_SPLITS = 160, 4, 8, 132
# States of a launch that stay in L2 until its second kernel reads them, if caches make space, which
# they do where no other row or CTA reads them again.
BYTES_TO_KEEP = 16 << 20


@dataclass(frozen=True)
class AbsorbedCut:
    """What a row's context is cut by (latent_slots.cuh), and the most splits that a row has."""

    short_context: int
    short_split: int
    long_split: int
    most_splits: int
    places: int


def absorbed_cut(shape: LatentGeometry, *, prompt: bool) -> AbsorbedCut:
    """The cut of a layer. Rows of a prompt fill the GPU by their number: each has one split."""
    if prompt:
        return AbsorbedCut(0, 1, 1, 1, 1)
    places = absorbed_places(shape)
    return AbsorbedCut(SHORT_CONTEXT, SHORT_SPLIT, LONG_SPLIT, MAX_SPLITS, places)


def absorbed_places(shape: LatentGeometry) -> int:
    """The most splits that a row of this layer has where it decodes."""
    tiles = -(-shape.capacity // shape.tile)
    if shape.window:
        tiles = min(tiles, -(-(shape.window - 1) // shape.tile) + 1)
    short = -(-min(tiles, SHORT_CONTEXT) // SHORT_SPLIT)
    return max(short, min(MAX_SPLITS, -(-tiles // LONG_SPLIT) if tiles > SHORT_CONTEXT else 0))


def lower_absorbed(
    shape: LatentGeometry, target: Target, arguments: tuple[str, ...], *, prompt: bool
) -> Lowering:
    """A state of every split, row and head; then the splits join and become values."""
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
    """Why a prompt's chunk has too many rows, if it does."""
    needed = _state_bytes(shape, absorbed_cut(shape, prompt=True).places)
    if needed <= MAX_PROMPT_STATE_BYTES:
        return None
    return Unsupported(
        f"MlaAttention: a prompt's chunk of {shape.rows} rows and {shape.q_heads} heads leaves "
        f"{needed >> 20} MiB of sums, at most {MAX_PROMPT_STATE_BYTES >> 20} are for that: take "
        "fewer rows at a time."
    )


def _value_constants(shape: LatentGeometry, places: int) -> tuple[tuple[str, int], ...]:
    """What both kernels that make values are compiled with."""
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
    """Splits join and become values, a row and head a CTA."""
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
    """The one split of each row becomes values, 16 rows of a head at a time."""
    constants = (*_value_constants(shape, 1), ("PROMPT_ROWS", PROMPT_ROWS))
    return OpLaunch(
        Kernel("mla_attention", "project_prompt", constants, file="prompt_values.cu"),
        grid=(shape.q_heads, -(-shape.rows // PROMPT_ROWS), shape.v_width // _columns(shape)),
        block=PROMPT_THREADS,
        shared_bytes=0,
        arguments=(*_VALUE_ARGUMENTS, shape.rows),
    )


def _columns(shape: LatentGeometry) -> int:
    """Of a value, that a CTA has the weights of."""
    return min(shape.v_width, MAX_COLUMNS)


def _state_bytes(shape: LatentGeometry, places: int) -> int:
    """Of the sums of all splits, rows and heads."""
    return 64 * shape.rows * shape.q_heads * places * -(-shape.value // 32)


def _keeps_states(shape: LatentGeometry, places: int) -> bool:
    alone = shape.rows <= shape.batch and shape.head_groups == 1
    return alone and _state_bytes(shape, places) <= BYTES_TO_KEEP


def _weight_bytes(shape: LatentGeometry) -> int:
    """Of a head's weights, or those of ``MAX_COLUMNS`` of its columns: 16 bytes for each thread of
    as many rows as it takes at once."""
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
        ("SHORT_SLOT", cut.short_split),
        ("LONG_SLOT", cut.long_split),
        ("MOST_SLOTS", cut.most_splits),
        ("EVICT_FIRST", int(_keeps_states(shape, cut.places))),
        ("LAUNCH_ROWS", shape.rows),
        ("SHARED_BYTES", absorbed_shared_bytes(shape)),
    )
    return OpLaunch(
        # With entries of no whole panels the copier lacks some registers.
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
    """CTAs over the items: one for each SM, such that a CTA meets the same row of a sequence again
    and again, whose queries it then has already."""
    ctas = max(1, target.multiprocessors // shape.head_groups)
    sequence_rows = max(1, shape.rows // shape.batch)
    if sequence_rows <= ctas // 2:
        ctas -= ctas % sequence_rows
    return min(ctas, shape.rows * places)


def absorbed_shared_bytes(shape: LatentGeometry) -> int:
    """As absorbed_memory.cuh lays it out: tiles, queries and weights; factors, bases, sums;
    barriers; where the items of sequences begin."""
    panels = -(-shape.entry // PANEL)
    queries = (panels + 1) * ABSORBED_HEADS * 2 * PANEL
    barriers = 2 * STAGES * PARTS + 2 * HALVES + 2
    small = 4 * 6 * ABSORBED_HEADS + 8 * barriers + 4 * (shape.batch + 1)
    return STAGES * shape.stage_bytes + queries + small
