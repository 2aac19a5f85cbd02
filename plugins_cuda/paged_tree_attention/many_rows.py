"""PagedTreeAttention where sequences have many rows, as when SpecPV feeds a buffer again."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import Kernel, Lowering, OpLaunch
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry

WIDTH = 64
# Of a sequence: with fewer rows, or where no context is long, the plain kernel is as quick.
FEWEST_ROWS, FEWEST_SLOTS_OF_A_VIEW = 12, 8192
# Sequences with so few rows go to the plain kernel, where others share their launch.
FEW_ROWS = 8
ROWS_OF_A_CTA = 32
THREADS = 640
STAGES, STAGE_KEYS = 16, 32
HELD_BYTES = 512 * 9 * 16  # of the threads that attend: what the chains of a slot come to


def takes(shape: Geometry, slots: int) -> bool:
    """Whether the kernel of many rows does this launch, and does it quicker."""
    able = shape.width == WIDTH and not shape.window and slots > 1
    long = shape.capacity >= FEWEST_SLOTS_OF_A_VIEW
    return able and long and shape.most_rows >= FEWEST_ROWS


def with_many(shape: Geometry, plain: Lowering, split: int, slots: int) -> Lowering:
    """The launches of sequences with many rows, behind ``plain``'s for those with few.

    ``plain`` is the launch of the plain kernel with as many ``slots``; it is left out where there
    is one sequence.
    """
    few = 0 if shape.batch == 1 else FEW_ROWS
    shared = (*shape.constants(), ("BATCH", shape.batch), ("SLOTS", slots), ("FEW_ROWS", few))
    constants = (*shared, ("SPLIT", split), ("STAGES", STAGES))
    states = tuple(w for w in plain.workspaces if not w.zeroed)
    names = tuple(workspace.name for workspace in states)
    # Sequences end in a tile of their own: at most one more than whole tiles for each.
    tiles = (shape.rows - 1) // ROWS_OF_A_CTA + shape.batch
    attend = OpLaunch(
        Kernel("paged_tree_attention", "attend_many", constants, "many_rows.cu"),
        grid=(slots, shape.kv_heads, tiles),
        block=THREADS,
        shared_bytes=STAGES * 2 * STAGE_KEYS * WIDTH * 2 + HELD_BYTES,
        arguments=(*ARGUMENTS[:8], *names),
    )
    join = OpLaunch(
        Kernel("paged_tree_attention", "join_slots", shared, "join_slots.cu"),
        grid=(shape.rows, shape.kv_heads, 1),
        block=-(-shape.group * shape.width // 4 // 32) * 32,
        shared_bytes=0,
        arguments=(*ARGUMENTS[4:9], "attended", *names),
    )
    if few == 0:
        return Lowering((attend, join), states)
    [launch] = plain.launches
    kernel = Kernel(
        "paged_tree_attention",
        "attend_few",
        (*launch.kernel.constants, ("FEW_ROWS", few)),
        "few_rows.cu",
    )
    few_rows = replace(launch, kernel=kernel, reads_early=False)
    return Lowering((few_rows, attend, join), plain.workspaces)
