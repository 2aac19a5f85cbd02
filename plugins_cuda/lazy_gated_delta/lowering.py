"""LazyGatedDelta on a GPU: a CTA per sequence and value head computes its rows one by one.

Other launches before it compute the complete chunks of a prompt (``prefill.py``).
"""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.lazy_gated_delta.prefill import layer_constants, lower_chunks
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

# Columns of a state per warp.
WARP_COLUMNS = 8
# With wider keys, a state does not fit in registers.
MAX_WARPS, MAX_KEYS = 16, 128
# Rows of a prompt that are convolved together.
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
    """Return why no kernel supports states of these widths, or None."""
    if key_width % 16 or key_width > MAX_KEYS:
        return f"keys of {key_width}, CUDA kernels take multiples of 16 up to {MAX_KEYS}"
    if value_width % WARP_COLUMNS or value_width > WARP_COLUMNS * MAX_WARPS:
        limit = WARP_COLUMNS * MAX_WARPS
        return (
            f"values of {value_width}, CUDA kernels take multiples of {WARP_COLUMNS} up to {limit}"
        )
    return None


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for unsupported widths or too many draft tokens."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    _, value_heads, key_width, value_width = shapes["state_pool"]
    refused = refused_widths(key_width, value_width)
    if refused is not None:
        raise SpecbuildError(f"LazyGatedDelta: a state has {refused}; build with --backend cpu")
    rows, words = shapes["rows"][0], shapes["ancestor_bits"][1]
    batch, path = shapes["replay_path"]
    nodes = shapes["factor_pool"][1]
    key_heads, stores = int(request.attributes["key_heads"]), int(request.attributes["stores"])
    if -(-rows // batch) > nodes and not stores:
        raise SpecbuildError(
            f"LazyGatedDelta: a sequence has {-(-rows // batch)} rows, but its slot keeps {nodes}; "
            "build for the largest draft"
        )
    held, shared = _held_rows(request), _shared_bytes(request)
    if shared > request.target.shared_bytes_per_block:
        raise SpecbuildError(
            f"LazyGatedDelta: {held} rows of a sequence take {shared} bytes of shared memory; "
            f"a CTA has {request.target.shared_bytes_per_block}; build with fewer --draft-tokens"
        )
    default = _default_tactic(request)
    ctas, warms = (request.tactic.get(name, default[name]) for name in ("ctas", "warms"))
    resident = ctas * request.target.multiprocessors
    runs_at_once = value_heads * batch <= resident
    chunks = lower_chunks(request) if stores and request.phase == "prefill" else None
    constants = (
        *layer_constants(request),
        ("HELD", held),
        ("WORDS", words),
        ("PATH", path),
        ("STORES", stores),
        ("IS_TREE", int(not stores and -(-rows // batch) > 2)),
        ("CHUNKS", int(chunks is not None)),
        ("CTAS", ctas),
        ("GROUPS", 16 // ctas),
        ("WARMS", int(warms and runs_at_once)),
        ("AHEAD", resident if warms and not runs_at_once else 0),
        ("SLOTS", shapes["state_pool"][0]),
        ("SHARED_BYTES", shared),
    )
    launch = OpLaunch(
        Kernel("lazy_gated_delta", "lazy_gated_delta", constants),
        grid=(value_heads, batch, 1),
        block=32 * (value_width // (WARP_COLUMNS * ctas)),
        shared_bytes=shared,
        arguments=_POINTERS,
    )
    arrived = Workspace(_ARRIVED, batch * key_heads * ITEM_BYTES["int32"], zeroed=True)
    if chunks is None:
        return Lowering((launch,), (arrived,))
    return Lowering((*chunks.launches, launch), (arrived, *chunks.workspaces))


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics of steps, the default first, with all others.

    With more CTAs than multiprocessors, two CTAs hide each other's latency, with half of the
    registers each. Warming reads states into L2: all of them before the preceding projection ends,
    if all CTAs run at once, otherwise those of later CTAs while earlier ones compute.
    """
    if request.attributes["stores"]:
        return ({},)
    default = _default_tactic(request)
    numbers = (1, 2) if _can_halve_warps(request) else (1,)
    explicit = tuple({"ctas": ctas, "warms": warms} for ctas in numbers for warms in (0, 1))
    return ({}, *(tactic for tactic in explicit if tactic != default))


def _default_tactic(request: LoweringRequest) -> dict[str, int]:
    """Return the fastest tactic of 16 measured launches of Qwen3.5 27B and 35B-A3B on an H200."""
    if request.attributes["stores"]:
        return {"ctas": 1, "warms": 0}
    launched = request.tensors["state_pool"].shape[1] * request.tensors["replay_path"].shape[0]
    multiprocessors = request.target.multiprocessors
    # With many rows, a multiprocessor holds the rows of one CTA only.
    fits = _can_halve_warps(request) and request.target.fits_twice(_shared_bytes(request))
    ctas = 2 if launched > multiprocessors and fits else 1
    # Reading later states ahead pays if a sequence has one row; more rows take longer themselves.
    single = request.tensors["rows"].shape[0] <= request.tensors["replay_path"].shape[0]
    return {"ctas": ctas, "warms": int(launched <= ctas * multiprocessors or single)}


def _held_rows(request: LoweringRequest) -> int:
    """Return the rows of a sequence that a CTA holds in shared memory."""
    rows, (batch, path) = request.tensors["rows"].shape[0], request.tensors["replay_path"].shape
    return max(PROMPT_ROWS if request.attributes["stores"] else -(-rows // batch), path)


def _shared_bytes(request: LoweringRequest) -> int:
    """Return the shared memory of a CTA (device/held.cuh)."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    _, _, key_width, value_width = shapes["state_pool"]
    path = shapes["replay_path"][1]
    taps, words, held = shapes["conv_weight"][2], shapes["ancestor_bits"][1], _held_rows(request)
    mixed = 2 * key_width + value_width
    later = max(2 * held * value_width, path * (key_width + value_width))
    numbers = 2 * held * key_width + later + 2 * held + 2 * path + held * (taps - 1 + words) + 1
    halves = (held + taps - 1) * mixed + 2 * held * value_width + mixed * taps + value_width
    return numbers * ITEM_BYTES["float32"] + halves * ITEM_BYTES["bfloat16"]


def _can_halve_warps(request: LoweringRequest) -> bool:
    """Return whether a CTA can have half as many warps, each with twice the columns."""
    return request.tensors["state_pool"].shape[3] % (2 * WARP_COLUMNS) == 0
