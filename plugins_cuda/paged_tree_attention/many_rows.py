"""PagedTreeAttention where sequences have several rows, as trees do, or many, as when SpecPV
re-verifies a buffer."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import Kernel, Lowering, OpLaunch
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry

WIDTH = 64
# Sequences with so few rows go to the plain kernel, where others share their launch.
FEW_ROWS = 8
# Of a warpgroup. Of the four of a CTA so many have rows of their own; the rest take other tile
# runs.
GROUP_ROWS = 8
THREADS = 768
STAGES, STAGE_KEYS = 16, 32
HELD_BYTES = 128 * 9 * 16  # of such a warpgroup: the total of a split's tile runs


def row_groups(shape: Geometry) -> int:
    """Warpgroups of a CTA with rows of their own: 1, 2 or 4."""
    return next((n for n in (1, 2) if shape.most_rows <= n * GROUP_ROWS), 4)


def _shares(tiles: int, ctas: int, multiprocessors: int) -> int:
    """Into how many shares row tiles go, each for so many CTAs: the fewest rounds of tiles."""
    return min(range(1, tiles + 1), key=lambda n: -(-ctas * n // multiprocessors) * -(-tiles // n))


def with_many(
    shape: Geometry, plain: Lowering, split: int, splits: int, multiprocessors: int
) -> Lowering:
    """The launches of sequences with many rows, behind ``plain``'s for those with few.

    ``plain`` is the launch of the plain kernel with as many ``splits``; it is left out where there
    is one sequence, or where up to 16 rows are usual: there sequences do not differ.
    """
    groups = row_groups(shape)
    few = 0 if shape.batch == 1 or groups < 4 else FEW_ROWS
    shared = (*shape.constants(), ("BATCH", shape.batch), ("SLOTS", splits), ("FEW_ROWS", few))
    constants = (*shared, ("SPLIT", split), ("ROW_GROUPS", groups), ("STAGES", STAGES))
    states = tuple(w for w in plain.workspaces if not w.zeroed)
    names = tuple(workspace.name for workspace in states)
    # Sequences end in a tile of their own: at most one more than whole tiles for each.
    tiles = (shape.rows - 1) // (groups * GROUP_ROWS) + shape.batch
    shares = _shares(tiles, splits * shape.kv_heads, multiprocessors)
    attend = OpLaunch(
        Kernel("paged_tree_attention", "attend_many", constants, "many_rows.cu"),
        grid=(splits, shape.kv_heads, shares),
        block=THREADS,
        shared_bytes=STAGES * 2 * STAGE_KEYS * WIDTH * 2 + groups * HELD_BYTES,
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
