"""PagedTreeAttention of heads wider than 128: steps, and of 512 prompts too."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import ARGUMENTS, Geometry
from specbuild.plugins_cuda.paged_tree_attention.splits import power_of_two
from specbuild.runtime.errors import SpecbuildError

WARPS, ROWS = 16, 2
# Keys of a tile: half as many for heads wider than _HALVED_FROM. A CTA holds _BUFFERS tiles.
_TILE_KEYS, _HALVED_FROM, _BUFFERS = 64, 256, 3
# Positions of a split by the most query heads of a KV head, and the maximum of splits; splits are
# longer if the context needs it. With few sequences every split has a CTA, so short splits occupy
# more multiprocessors. The state of a split takes as many bytes as one position of keys and values
# for each query head.
SPLIT_KEYS, MAX_SLOTS = {4: 64, 8: 128}, 128
# CTAs that share the rows of a sequence.
MAX_ROW_CTAS = 1024
_ARRIVALS, _SUMS, _VALUES = "workspace_arrivals", "workspace_sums", "workspace_values"


def lower_wide(request: LoweringRequest, shape: Geometry) -> Lowering:
    """Return one launch for any number of rows; SpecbuildError for lists of slots (DSA)."""
    if "selected" in request.tensors:
        raise SpecbuildError(
            f"PagedTreeAttention: got lists of slots with heads of {shape.width}, expected heads "
            "up to 128; build for the cpu backend"
        )
    split = next(keys for most, keys in SPLIT_KEYS.items() if shape.group <= most)
    while split * MAX_SLOTS < shape.capacity:
        split *= 2
    slots = -(-shape.capacity // split)
    row_ctas = min(MAX_ROW_CTAS, -(-shape.max_rows // ROWS))
    groups = row_ctas * shape.batch * shape.kv_heads
    # CTAs of a row wait for each other, so those of a launch must fit on the GPU together: a
    # multiprocessor has one.
    free = request.target.multiprocessors // groups
    context_ctas = 1 if request.phase == "prefill" else min(power_of_two(max(1, free)), slots)
    reads_early = request.phase == "decode"
    units = shape.width // 8
    tile_keys = _TILE_KEYS if shape.width <= _HALVED_FROM else _TILE_KEYS // 2
    shared = 16 * (2 * _BUFFERS * tile_keys * units + 16 * units)
    shared += 4 * (8 * WARPS // tile_keys * 16 * (tile_keys + 4) + 3 * 16 + 4)
    shared += 2 * 16 * (tile_keys + 8)
    constants = (
        *shape.constants(),
        ("TILE_KEYS", tile_keys),
        ("SPLIT_KEYS", split),
        ("SLOTS", slots),
        ("CONTEXT_CTAS", context_ctas),
        ("ROW_CTAS", row_ctas),
        ("EARLY", int(reads_early)),
        ("SHARED_BYTES", shared),
    )
    workspaces: tuple[Workspace, ...] = ()
    if context_ctas > 1:
        states = shape.rows * shape.kv_heads * slots * shape.group
        workspaces = (
            Workspace(_ARRIVALS, 4 * shape.rows * shape.kv_heads, zeroed=True),
            Workspace(_SUMS, 8 * states),
            Workspace(_VALUES, 4 * states * shape.width),
        )
    names = tuple(w.name for w in workspaces) or (None, None, None)
    launch = OpLaunch(
        Kernel("paged_tree_attention", "attend_wide", constants, file="wide_heads.cu"),
        grid=(context_ctas * row_ctas, shape.kv_heads, shape.batch),
        block=32 * WARPS,
        shared_bytes=shared,
        arguments=(*ARGUMENTS, *names),
        reads_early=reads_early,
    )
    return Lowering((launch,), workspaces)
