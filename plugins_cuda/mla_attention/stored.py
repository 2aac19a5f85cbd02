"""Latent attention of several rows of a sequence, with keys that are rebuilt once and stored."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, OpLaunch, Workspace
from specbuild.plugins_cuda.mla_attention.cut import HEADS, LatentCut, stages_of
from specbuild.plugins_cuda.mla_attention.geometry import (
    CTA_FEATURES,
    KEY_THREADS,
    MAX_HELD_STEPS,
    UNCUT,
    LatentGeometry,
)

WARPGROUP = 128
# Registers of a thread, of 504 for three warpgroups: one copies, two rebuild keys or attend.
COPY_REGISTERS, OTHER_REGISTERS = 40, 232
# Rows of w_k that pass through shared memory at once.
LOADED_ROWS = 64
SHARED_ALIGNMENT = 1024
_SEEN = ("page_table", "row_start", "row_slot", "tree_start", "ancestor_bits", "selected")


def store_and_attend(
    request: LoweringRequest, shape: LatentGeometry, cut: LatentCut
) -> tuple[tuple[OpLaunch, OpLaunch], Workspace]:
    """Return the launches that rebuild and attend, and the workspace of the stored keys."""
    tiles = shape.batch * _tiles(shape) + shape.rows * _own_tiles(shape)
    keys = Workspace("workspace_keys", tiles * shape.head_groups * _key_bytes(shape))
    return (_rebuild(request, shape), _attend(request, shape, cut)), keys


def _tiles(shape: LatentGeometry) -> int:
    """Return the maximum of a sequence's tiles."""
    return -(-shape.capacity // shape.tile)


def _own_tiles(shape: LatentGeometry) -> int:
    """Return the tiles of a row with the maximum of ancestors, the first anywhere in a tile."""
    return -(-(shape.tile - 1 + 32 * shape.words) // shape.tile)


def _key_bytes(shape: LatentGeometry) -> int:
    """Return the bytes of a tile's keys, for the features of a CTA."""
    return CTA_FEATURES * shape.tile * 2


def _held(request: LoweringRequest) -> int:
    """Return the entries of a list, if rows have lists."""
    return request.tensors["selected"].shape[2] if "selected" in request.tensors else 1


def _sizes(shape: LatentGeometry, stages: int) -> tuple[tuple[str, int | float], ...]:
    """Return the constants of both launches."""
    return (
        *shape.key_constants(MAX_HELD_STEPS),
        ("BATCH", shape.batch),
        ("TILES", _tiles(shape)),
        ("OWN_TILES", _own_tiles(shape)),
        ("LISTED", 0),
        ("STAGES", stages),
        ("COPY_REGISTERS", COPY_REGISTERS),
    )


def _rebuild(request: LoweringRequest, shape: LatentGeometry) -> OpLaunch:
    def shared_bytes(stages: int) -> int:
        ring = stages * (shape.stage_bytes + shape.table_bytes + 16)
        return ring + LOADED_ROWS * CTA_FEATURES * 2 + 8

    stages = stages_of(request, shape, lambda count: shared_bytes(count) + _extent_bytes(shape))
    constants = (
        *shape.walk_constants(),
        *UNCUT,
        *_sizes(shape, stages),
        ("LAUNCH_ROWS", shape.rows),
        ("KEY_REGISTERS", OTHER_REGISTERS),
        ("SHARED_BYTES", shared_bytes(stages)),
    )
    fill = max(1, request.target.multiprocessors // shape.head_groups)
    ctas = min(shape.batch * _tiles(shape), fill)
    return OpLaunch(
        Kernel("mla_attention", "rebuild_keys", constants, file="stored_keys.cu"),
        grid=(ctas, shape.head_groups, 1),
        block=KEY_THREADS + WARPGROUP,
        shared_bytes=shared_bytes(stages),
        arguments=(
            *("c_pool", "w_k", "b_k", "cos", "sin", *_SEEN, "page_position", "workspace_keys"),
            _held(request),
        ),
    )


def _extent_bytes(shape: LatentGeometry) -> int:
    """Return the bytes of sequence and row extents, before the aligned buffers."""
    return -(-4 * (shape.batch + shape.rows) // SHARED_ALIGNMENT) * SHARED_ALIGNMENT


def _attend(request: LoweringRequest, shape: LatentGeometry, cut: LatentCut) -> OpLaunch:
    states = cut.states(shape)
    maxima = 4 * (CTA_FEATURES // shape.width) * 2 * HEADS

    def shared_bytes(stages: int) -> int:
        ring = stages * (shape.stage_bytes + _key_bytes(shape) + 16)
        return ring + cut.consumer_warpgroups * (
            states * shape.tile * 2 + 16 * states + 4 * (maxima + states)
        )

    stages = stages_of(request, shape, shared_bytes)
    # Sequences end with a separate tile: at most one incomplete tile each.
    row_tiles = (shape.rows - 1) // (cut.rows * cut.consumer_warpgroups) + shape.batch
    constants = (
        *cut.constants(shape),
        *_sizes(shape, stages),
        ("MIX_REGISTERS", OTHER_REGISTERS),
        ("SHARED_BYTES", shared_bytes(stages)),
    )
    return OpLaunch(
        Kernel("mla_attention", "attend_stored", constants, file="stored.cu"),
        grid=(cut.context_ctas, shape.head_groups, row_tiles),
        block=(cut.consumer_warpgroups + 1) * WARPGROUP,
        shared_bytes=shared_bytes(stages),
        arguments=(
            *("q", "c_pool", *_SEEN, "workspace_keys", "workspace_sums", "workspace_values"),
            _held(request),
        ),
    )
