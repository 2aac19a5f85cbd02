"""MlaAttention on a GPU: how a launch is cut over rows, heads and the context."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Target,
    Workspace,
)
from specbuild.plugins_cuda.mla_attention.absorbed import absorbed_shared_bytes, lower_absorbed
from specbuild.plugins_cuda.mla_attention.geometry import (
    CTA_FEATURES,
    ENTRY_STEP,
    MOST_HELD,
    MOST_SUMS,
    PANEL,
    LatentGeometry,
    latent_geometry,
)
from specbuild.plugins_cuda.mla_attention.prefill import lower_prefill
from specbuild.runtime.errors import SpecbuildError

FOLDER = "mla_attention"
PROJECT_THREADS = 256
PROJECT_ROWS = 16
HEADS = 8
# Warpgroups: one copies, two rebuild keys, one attends. Registers of a thread, of 512 for the four.
THREADS = 512
ALL_REGISTERS = 512
MOST_STAGES = 5

# Slots of the context, and groups of them that join first: constants of the layer, as a row's sums
# are taken slot by slot. The CTAs of one row are to fill the GPU; those of many rows take whole
# groups and leave fewer states. A window spans few tiles, each of which is a CTA's.
CTAS_WANTED = 128
MOST_SLOTS, FEWEST_SLOTS, WINDOW_SLOTS = 128, 16, 4
SLOTS_OF_A_GROUP, FEWEST_GROUPS = 8, 8
WIDEST_WINDOW_OF_FEW_SLOTS = 256

ATTEND = (
    "page_table",
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "selected",
    "page_position",
    "workspace_sums",
    "workspace_values",
)


@dataclass(frozen=True)
class LatentCut:
    """How one launch is cut; ``rows`` are those of a CTA."""

    split: int
    groups: int
    slots_in_use: int
    context_ctas: int
    rows: int
    row_ctas: int
    stages: int

    @property
    def places(self) -> int:
        """States of a row and head in the workspaces: of slots, or of whole groups of them."""
        whole_groups = self.context_ctas <= self.groups < self.split
        return min(self.groups, self.slots_in_use) if whole_groups else self.slots_in_use


def lower(request: LoweringRequest) -> Lowering:
    """Attention over the slots, then their join and the projection to values.

    In phase ``decode`` a row's sums do not depend on the grid that is chosen here. Prompt chunks
    have plain attention over what was rebuilt for all of their rows, where keys are rebuilt. Where
    rows have lists the first launch is that of rows that see everything, and one of the others
    follows, which leaves the same states.
    """
    shape = latent_geometry(request)
    if "selected" in request.tensors:
        _require_lists(request, shape)
    if request.phase == "prefill" and shape.rebuilt and shape.v_width == shape.width:
        if shape.viewed:
            raise SpecbuildError(
                "MlaAttention: no kernel rebuilds what a prompt's rows see where slots are no "
                "positions (page_position): leave it out there."
            )
        return lower_prefill(request, shape)
    if not shape.rebuilt:
        _require_shared(shape, absorbed_shared_bytes(shape), request.target)
        return lower_absorbed(shape, request.target, ATTEND)
    cut = _cut(request, shape)
    states = shape.rows * shape.q_heads * cut.places
    panels = -(-shape.value // PANEL)
    tiles = -(-shape.rows * (shape.q_heads // shape.v_heads) // PROJECT_ROWS)
    partials = tiles * shape.v_heads * panels * PROJECT_ROWS * shape.v_width
    workspaces = (
        Workspace("workspace_sums", 8 * states),
        Workspace("workspace_values", 4 * states * shape.value),
        Workspace("workspace_partials", 4 * partials),
        Workspace("workspace_arrivals", 4 * tiles * shape.v_heads, zeroed=True),
    )
    attend: tuple[OpLaunch, ...] = (_attend(shape, cut),)
    if "selected" in request.tensors:
        attend = _attend_lists(request, shape, cut)
    return Lowering((*attend, _project(shape, cut, panels, tiles)), workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tiles in flight, rows of a CTA, CTAs over the context; the default first."""
    shape = latent_geometry(request)
    if request.phase == "prefill" or not shape.rebuilt or "selected" in request.tensors:
        return ({},)
    if shape.rows == shape.batch:
        return ({}, {"stages": 3}, {"context_ctas": 8})
    return ({}, {"rows": 1}, {"context_ctas": 8})


def _require_lists(request: LoweringRequest, shape: LatentGeometry) -> None:
    """SpecbuildError for a launch whose lists no kernel takes."""
    if request.phase == "prefill":
        raise SpecbuildError(
            "MlaAttention: no kernel narrows the chunks of a prompt to selected slots: leave the "
            "lists out there."
        )
    if shape.window:
        raise SpecbuildError(
            f"MlaAttention: selected slots in a layer with a window of {shape.window}, the CUDA "
            "kernels take them in full-attention layers: build for the cpu target."
        )


def _attend_lists(
    request: LoweringRequest, shape: LatentGeometry, cut: LatentCut
) -> tuple[OpLaunch, OpLaunch]:
    """The launches of rows that see everything, and of rows with lists, each in CTAs of its own."""
    held = request.tensors["selected"].shape[2]
    row_ctas = -(-shape.rows // shape.batch)
    single = replace(cut, rows=1, row_ctas=row_ctas, stages=_stages(request, shape, 1))
    files = {"attend_whole_rows": "whole_rows.cu", "attend_listed": "selected.cu"}
    whole, listed = (
        replace(
            launch,
            kernel=replace(launch.kernel, entry=entry, file=file),
            arguments=(*launch.arguments, held),
        )
        for launch, (entry, file) in zip(
            (_attend(shape, cut), _attend(shape, single, listed=True)), files.items(), strict=True
        )
    )
    return whole, listed


def _attend(shape: LatentGeometry, cut: LatentCut, *, listed: bool = False) -> OpLaunch:
    constants = (
        *shape.walk_constants(),
        ("VALUE", shape.value),
        ("Q_HEADS", shape.q_heads),
        ("SCALE", shape.scale),
        ("SPLIT", cut.split),
        ("GROUPS", cut.groups),
        ("PLACES", cut.places),
        ("SLOTS_IN_USE", cut.slots_in_use),
        ("CONTEXT_CTAS", cut.context_ctas),
        ("ROWS", cut.rows),
        ("ROW_CTAS", cut.row_ctas),
        ("STAGES", cut.stages),
        ("LISTED", int(listed)),
    )
    grid = (cut.context_ctas, shape.head_groups, shape.batch * cut.row_ctas)
    shared = _shared_bytes(shape, cut.rows, cut.stages)
    copy, keys, mix = _registers(shape, cut.rows)
    constants += (
        *shape.key_constants(shape.held_steps(cut.rows)),
        ("GROUP", shape.group),
        ("COPY_REGISTERS", copy),
        ("KEY_REGISTERS", keys),
        ("MIX_REGISTERS", mix),
        ("LAUNCH_ROWS", shape.rows),
        ("SEQUENCE_ROWS", max(1, shape.rows // shape.batch)),
    )
    arguments = ("q", "c_pool", "w_k", "b_k", "cos", "sin", *ATTEND)
    return OpLaunch(Kernel(FOLDER, "attend_latents", constants), grid, THREADS, shared, arguments)


def _registers(shape: LatentGeometry, rows: int) -> tuple[int, int, int]:
    """Of a thread that copies, that rebuilds keys, that attends."""
    steps = min(shape.held_steps(rows), shape.entry // ENTRY_STEP)
    if steps == MOST_HELD // ENTRY_STEP:
        return 40, 176, 120
    keys = -(-(64 + 4 * steps) // 8) * 8
    copy = 32
    return copy, keys, min(240, ALL_REGISTERS - copy - 2 * keys)


def _project(shape: LatentGeometry, cut: LatentCut, panels: int, tiles: int) -> OpLaunch:
    constants = (
        ("BATCH", shape.batch),
        ("Q_HEADS", shape.q_heads),
        ("V_HEADS", shape.v_heads),
        ("V_WIDTH", shape.v_width),
        ("VALUE", shape.value),
        ("PANELS", panels),
        ("PLACES", cut.places),
        ("GROUPS", min(cut.groups, cut.places)),
        ("TILE", shape.tile),
        ("WINDOW", shape.window),
        ("HAS_SINKS", int(shape.has_sinks)),
        ("HAS_BIAS", int(shape.has_value_bias)),
    )
    return OpLaunch(
        Kernel(FOLDER, "project_values", constants, file="values.cu"),
        grid=(panels, shape.v_heads, tiles),
        block=PROJECT_THREADS,
        shared_bytes=0,
        arguments=(
            *("w_v", "b_v", "row_start", "row_slot", "sinks", "attended"),
            *("workspace_sums", "workspace_values", "workspace_partials", "workspace_arrivals"),
        ),
    )


def _cut(request: LoweringRequest, shape: LatentGeometry) -> LatentCut:
    split, slot_groups = _split(shape)
    in_use = max(1, min(split, -(-shape.capacity // shape.tile)))
    sequence_rows = -(-shape.rows // shape.batch)
    several = sequence_rows > 1 and shape.entry <= MOST_HELD and shape.sums_held(2) <= MOST_SUMS
    most_rows = 2 if several else 1
    rows = request.tactic.get("rows", most_rows)
    row_ctas = -(-sequence_rows // rows)
    groups = shape.batch * shape.head_groups * row_ctas
    context_ctas = min(in_use, max(1, request.target.multiprocessors // groups))
    context_ctas = min(in_use, request.tactic.get("context_ctas", _even(context_ctas, split)))
    stages = _stages(request, shape, rows)
    _require_shared(shape, _shared_bytes(shape, rows, stages), request.target)
    return LatentCut(split, slot_groups, in_use, context_ctas, rows, row_ctas, stages)


def _stages(request: LoweringRequest, shape: LatentGeometry, rows: int) -> int:
    """Tiles in flight, as many as find room beside so many rows."""
    stages = request.tactic.get("stages", MOST_STAGES)
    while stages > 2 and _shared_bytes(shape, rows, stages) > request.target.shared_bytes_per_block:
        stages -= 1
    return stages


def _require_shared(shape: LatentGeometry, nbytes: int, target: Target) -> None:
    limit = target.shared_bytes_per_block
    if nbytes > limit:
        raise SpecbuildError(
            f"MlaAttention: cache entries of {shape.entry} values need {nbytes} bytes of shared "
            f"memory, of which a CTA has {limit}: build for the cpu target."
        )


def _split(shape: LatentGeometry) -> tuple[int, int]:
    """Slots of a layer's context, and the groups that they join in."""
    if 0 < shape.window <= WIDEST_WINDOW_OF_FEW_SLOTS:
        return WINDOW_SLOTS, WINDOW_SLOTS
    slots = 1 << (CTAS_WANTED // shape.head_groups).bit_length() - 1
    slots = max(FEWEST_SLOTS, min(slots, MOST_SLOTS))
    return slots, max(FEWEST_GROUPS, slots // SLOTS_OF_A_GROUP)


def _even(context_ctas: int, split: int) -> int:
    """The most CTAs, up to these, that have as many slots each."""
    return min(split, 1 << context_ctas.bit_length() - 1)


def _shared_bytes(shape: LatentGeometry, rows: int, stages: int) -> int:
    """As the kernel lays it out: a ring of tiles, then what keys, weights and states need."""
    heads = CTA_FEATURES // shape.width
    states = rows * heads * HEADS
    ring = stages * (shape.stage_bytes + shape.table_bytes)
    keys = 2 * CTA_FEATURES * shape.tile * 2
    weights = states * shape.tile * 2
    small = 4 * 4 * heads * 2 * HEADS + 20 * states + 8 * (2 * stages + 4) + 16
    return ring + keys + weights + shape.waiting_bytes(shape.held_steps(rows)) + small
