"""MlaAttention in prefill: keys and values are rebuilt once for all rows of the chunk."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.plugins_cuda.mla_attention.geometry import (
    KEY_THREADS,
    MAX_HELD,
    MAX_HELD_STEPS,
    UNCUT,
    LatentGeometry,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry
from specbuild.plugins_cuda.paged_tree_attention.prefill import attend_prompt


def lower_prefill(request: LoweringRequest, shape: LatentGeometry) -> Lowering:
    """Return the launches for ``q`` [T, Hq, D] → ``attended``: rebuild, then plain attention.

    The workspaces hold one layer's keys and values of the group's pages.
    """
    shape = replace(shape, tile=64 if shape.entry <= MAX_HELD else 32)
    stage = shape.stage_bytes + shape.table_bytes
    shared_bytes = 2 * stage + shape.waiting_bytes(MAX_HELD_STEPS)
    constants = (
        *shape.walk_constants(),
        *shape.key_constants(MAX_HELD_STEPS),
        ("BATCH", shape.batch),
        *UNCUT,
        ("LISTED", 0),
        ("SHARED_BYTES", shared_bytes),
    )
    tiles = -(-shape.capacity // shape.tile)
    groups = 2 * shape.head_groups
    rebuild = OpLaunch(
        Kernel("mla_attention", "rebuild_context", constants, file="rebuild.cu"),
        grid=(min(tiles, max(1, request.target.multiprocessors // groups)), groups, 1),
        block=KEY_THREADS,
        shared_bytes=shared_bytes,
        arguments=(
            *("c_pool", "w_k", "b_k", "w_v", "b_v", "cos", "sin", "page_table", "row_start"),
            *("row_slot", "tree_start", "ancestor_bits", "workspace_keys", "workspace_values"),
        ),
    )
    pool = shape.pages * shape.kv_heads * shape.page_size * shape.width * 2
    places = {"k_pool": "workspace_keys", "v_pool": "workspace_values"}
    attend = attend_prompt(
        _plain(shape), arguments=tuple(places.get(name, name) for name in ARGUMENTS)
    )
    return Lowering(
        (rebuild, attend),
        (Workspace("workspace_keys", pool), Workspace("workspace_values", pool)),
    )


def _plain(shape: LatentGeometry) -> Geometry:
    """Return the geometry of the same launch with a cache of keys and values."""
    return Geometry(
        rows=shape.rows,
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        group=shape.group,
        width=shape.width,
        page_size=shape.page_size,
        views=1,
        table=shape.table,
        words=shape.words,
        window=shape.window,
        scale=shape.scale,
        has_sinks=shape.has_sinks,
    )
