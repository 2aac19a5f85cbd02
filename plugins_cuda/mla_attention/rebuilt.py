"""Latent attention that rebuilds its keys, for launches with one or two rows per sequence."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.mla_attention.cut import HEADS, LatentCut, stages_of
from specbuild.plugins_cuda.mla_attention.geometry import (
    CTA_FEATURES,
    ENTRY_STEP,
    MAX_HELD_STEPS,
    LatentGeometry,
)

# Warpgroups: one copies, two rebuild keys, one attends; registers of four threads, one of each.
THREADS = 512
ALL_REGISTERS = 512
KEYS = ("q", "c_pool", "w_k", "b_k", "cos", "sin")


def attend_rebuilding(
    request: LoweringRequest,
    shape: LatentGeometry,
    cut: LatentCut,
    arguments: tuple[str, ...],
    *,
    listed: bool = False,
) -> OpLaunch:
    """Return a launch for whole rows, or if ``listed`` for rows with lists; see ``cut.rows``."""
    stages = stages_of(request, shape, lambda count: _shared_bytes(shape, cut, count))
    shared_bytes = _shared_bytes(shape, cut, stages)
    copy, keys, mix = _registers(shape, cut.rows)
    constants = (
        *cut.constants(shape),
        *shape.key_constants(shape.held_steps(cut.rows)),
        ("ROW_CTAS", cut.row_ctas),
        ("STAGES", stages),
        ("LISTED", int(listed)),
        ("COPY_REGISTERS", copy),
        ("KEY_REGISTERS", keys),
        ("MIX_REGISTERS", mix),
        ("LAUNCH_ROWS", shape.rows),
        ("SEQUENCE_ROWS", max(1, shape.rows // shape.batch)),
        ("SHARED_BYTES", shared_bytes),
    )
    return OpLaunch(
        Kernel("mla_attention", "attend_latents", constants),
        grid=(cut.context_ctas, shape.head_groups, shape.batch * cut.row_ctas),
        block=THREADS,
        shared_bytes=shared_bytes,
        arguments=(*KEYS, *arguments),
    )


def attend_whole(
    request: LoweringRequest, shape: LatentGeometry, cut: LatentCut, arguments: tuple[str, ...]
) -> OpLaunch:
    """Return the launch for whole rows, if other rows have lists."""
    launch = attend_rebuilding(request, shape, cut, arguments)
    return _of_lists(launch, request, "attend_whole_rows", "whole_rows.cu")


def attend_listed(
    request: LoweringRequest, shape: LatentGeometry, cut: LatentCut, arguments: tuple[str, ...]
) -> OpLaunch:
    """Return the launch for rows with lists, each in separate CTAs."""
    single = replace(
        cut,
        rows=1,
        row_ctas=-(-shape.rows // shape.batch),
        context_ctas=cut.listed_ctas,
        consumer_warpgroups=1,
    )
    launch = attend_rebuilding(request, shape, single, arguments, listed=True)
    return _of_lists(launch, request, "attend_listed", "selected.cu")


def _of_lists(launch: OpLaunch, request: LoweringRequest, entry: str, file: str) -> OpLaunch:
    held = request.tensors["selected"].shape[2]
    return replace(
        launch,
        kernel=replace(launch.kernel, entry=entry, file=file),
        arguments=(*launch.arguments, held),
    )


def _registers(shape: LatentGeometry, rows: int) -> tuple[int, int, int]:
    """Return the registers of a thread that copies, one that rebuilds keys, one that attends."""
    steps = min(shape.held_steps(rows), shape.entry // ENTRY_STEP)
    if steps == MAX_HELD_STEPS:
        return 40, 176, 120
    keys = -(-(64 + 4 * steps) // 8) * 8
    copy = 32
    return copy, keys, min(240, ALL_REGISTERS - copy - 2 * keys)


def _shared_bytes(shape: LatentGeometry, cut: LatentCut, stages: int) -> int:
    """Return the kernel's shared memory: a ring of tiles, then keys, weights and states."""
    heads, states = CTA_FEATURES // shape.width, cut.states(shape)
    ring = stages * (shape.stage_bytes + shape.table_bytes)
    keys = 2 * CTA_FEATURES * shape.tile * 2
    weights = states * shape.tile * 2
    small = 4 * 4 * heads * 2 * HEADS + 20 * states + 8 * (2 * stages + 4) + 16
    return ring + keys + weights + shape.waiting_bytes(shape.held_steps(cut.rows)) + small
