"""PagedTreeAttention for several rows per sequence: trees, or re-verified tokens (SpecPV)."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import Kernel, Lowering, OpLaunch
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry

# Sequences with at most this many rows use the plain kernel, if others share their launch.
FEW_ROWS = 8
MAX_USUAL_ROWS = 16  # up to this number of rows, all sequences use the same kernel
# Warps and threads of a warpgroup. One, two or four warpgroups of a CTA have separate rows; the
# others process other tile runs.
GROUP_WARPS, GROUP_THREADS = 4, 128
MAX_ROWS = 32  # of a CTA: each lane opens one row
STAGE_KEYS = 32
STAGE_BYTES = 128 << 10  # of all stages


def warpgroups(shape: Geometry) -> int:
    """Return the multiplying warpgroups of a CTA; wide heads need twice the registers for sums."""
    return 4 if shape.width == 64 else 2


def row_groups(shape: Geometry) -> int:
    """Return the warpgroups of a CTA with separate rows: 1, 2 or 4."""
    rows = GROUP_WARPS * shape.mma_rows
    limit = min(warpgroups(shape), MAX_ROWS // rows)
    return next((n for n in (1, 2) if n < limit and shape.max_rows <= n * rows), limit)


def _shares(tiles: int, ctas: int, multiprocessors: int) -> int:
    """Return the number of shares of row tiles with the fewest rounds; each has ``ctas`` CTAs."""
    return min(range(1, tiles + 1), key=lambda n: -(-ctas * n // multiprocessors) * -(-tiles // n))


def with_many(
    shape: Geometry, plain: Lowering, split: int, splits: int, multiprocessors: int
) -> Lowering:
    """Return the launches for sequences with many rows, after ``plain``'s for those with few.

    ``plain`` is the launch of the plain kernel with as many ``splits``. It is omitted for a single
    sequence, and if few rows are usual, because all sequences then use the same kernel.
    """
    groups, all_groups = row_groups(shape), warpgroups(shape)
    few = 0 if shape.batch == 1 or shape.max_rows <= MAX_USUAL_ROWS else FEW_ROWS
    shared = (*shape.constants(), ("BATCH", shape.batch), ("SLOTS", splits), ("FEW_ROWS", few))
    # The state of a split's tile runs follows the stages.
    held = GROUP_THREADS * (shape.width // 8 + 1) * 16
    shared_bytes = STAGE_BYTES + groups * held
    constants = (
        *shared,
        ("SPLIT", split),
        ("WARPGROUPS", all_groups),
        ("ROW_GROUPS", groups),
        ("STAGES", STAGE_BYTES // (2 * STAGE_KEYS * shape.width * 2)),
        ("SHARED_BYTES", shared_bytes),
    )
    states = tuple(w for w in plain.workspaces if not w.zeroed)
    names = tuple(workspace.name for workspace in states)
    # Sequences end with a separate tile: at most one incomplete tile each.
    tiles = (shape.rows - 1) // (groups * GROUP_WARPS * shape.mma_rows) + shape.batch
    shares = _shares(tiles, splits * shape.kv_heads, multiprocessors)
    attend = OpLaunch(
        Kernel("paged_tree_attention", "attend_many", constants, "many_rows.cu"),
        grid=(splits, shape.kv_heads, shares),
        block=GROUP_THREADS * (all_groups + 2),
        shared_bytes=shared_bytes,
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
