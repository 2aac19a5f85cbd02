"""LazyGatedDelta on a GPU: one CTA per sequence and value head."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

# Columns of a state that a warp holds.
WARP_COLUMNS = 8
# Registers hold no wider keys.
MAX_WARPS, MAX_KEYS = 16, 128
# Rows of a prompt that are convolved at once.
PROMPT_ROWS = 16
_ARRIVED = "workspace_arrived"
_POINTERS = (
    "rows",
    "conv_weight",
    "decay_scale",
    "dt_bias",
    "norm",
    "positions",
    "row_start",
    "ancestor_bits",
    "state_slot",
    "replay_path",
    "replay_count",
    "tail_pool",
    "state_pool",
    "factor_pool",
    "output",
    _ARRIVED,
)


def refused_widths(key_width: int, value_width: int) -> str | None:
    """Why no kernel holds states of these widths, None where one does."""
    if key_width % 16 or key_width > MAX_KEYS:
        return f"keys of {key_width}, CUDA kernels take multiples of 16 up to {MAX_KEYS}"
    if value_width % WARP_COLUMNS or value_width > WARP_COLUMNS * MAX_WARPS:
        most = WARP_COLUMNS * MAX_WARPS
        return (
            f"values of {value_width}, CUDA kernels take multiples of {WARP_COLUMNS} up to {most}"
        )
    return None


def lower(request: LoweringRequest) -> Lowering:
    """One launch. SpecbuildError for widths that no kernel takes and for too many draft tokens."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    _, value_heads, key_width, value_width = shapes["state_pool"]
    refused = refused_widths(key_width, value_width)
    if refused is not None:
        raise SpecbuildError(f"LazyGatedDelta: a state has {refused}; build with --backend cpu")
    (rows, row_width), words = shapes["rows"], shapes["ancestor_bits"][1]
    channels, _, taps = shapes["conv_weight"]
    batch, path = shapes["replay_path"]
    nodes = shapes["factor_pool"][1]
    key_heads, stores = int(request.attributes["key_heads"]), int(request.attributes["stores"])
    held = PROMPT_ROWS if stores else -(-rows // batch)
    if held > nodes and not stores:
        raise SpecbuildError(
            f"LazyGatedDelta: {held} rows a sequence, but its slot keeps {nodes}; build it for the "
            "largest draft"
        )
    held = max(held, path)
    mixed = 2 * key_width + value_width
    numbers = held * (2 * key_width + 3 * value_width + 2) + (taps - 1) * mixed
    numbers += held * (taps - 1 + words) + taps
    shared = numbers * ITEM_BYTES["float32"]
    if shared > request.target.shared_bytes_per_block:
        raise SpecbuildError(
            f"LazyGatedDelta: {held} rows a sequence take {shared} bytes of shared memory, of "
            f"which a CTA has {request.target.shared_bytes_per_block}; ask for fewer --draft-tokens"
        )
    constants = (
        ("KEY_HEADS", key_heads),
        ("VALUE_HEADS", value_heads),
        ("KEY_WIDTH", key_width),
        ("VALUE_WIDTH", value_width),
        ("CHANNELS", channels),
        ("TAPS", taps),
        ("ROW_WIDTH", row_width),
        ("NODES", nodes),
        ("HELD", held),
        ("WORDS", words),
        ("PATH", path),
        ("STORES", stores),
        ("IS_TREE", int(not stores and -(-rows // batch) > 2)),
        ("EPS", float(request.attributes["eps"])),
        ("SHARED_BYTES", shared),
    )
    launch = OpLaunch(
        Kernel("lazy_gated_delta", "lazy_gated_delta", constants),
        grid=(value_heads, batch, 1),
        block=32 * (value_width // WARP_COLUMNS),
        shared_bytes=shared,
        arguments=_POINTERS,
    )
    arrived = batch * key_heads * ITEM_BYTES["int32"]
    return Lowering((launch,), (Workspace(_ARRIVED, arrived, zeroed=True),))
