"""LazyGatedDelta of prompts: complete chunks of 64 rows, on tensor cores.

Two launches process ``MAX_PLACES`` chunks: the first computes everything that does not depend on
the state, for all chunks at once. In the second, two CTAs per sequence and value head advance the
state chunk by chunk. A last launch normalizes and gates all rows. Their bits differ from those of
the row loop. Therefore only prompts use them, and launches of prompts end at multiples of 64
tokens.
"""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.runtime.engine_dir.cache_groups import SNAPSHOT_STEP
from specbuild.runtime.engine_dir.plan import ITEM_BYTES

CHUNK = SNAPSHOT_STEP
# The maximum of chunks in the workspaces, for 2048 rows: 94 MB for a layer of 27B.
MAX_PLACES = 32
# CTAs that share the columns of a state, which are independent: no bit depends on it. The serial
# chain of a single prompt is the longest launch, and it is shorter with fewer warps in a CTA.
COLUMN_CTAS = 2
# The maximum of value heads per key head: a thread has a column of one head's inverse.
_MAX_SHARERS, _PREPARING_THREADS, _NORM_THREADS = 4, 256, 256
# Padding of operand rows in shared memory, in bf16; products and factors of a chunk.
_PADDING, _PRODUCTS, _SCALES = 8, 4, 4
_FOLDER = "lazy_gated_delta"


def layer_constants(request: LoweringRequest) -> tuple[tuple[str, int | float], ...]:
    """Return the constants of a layer."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    _, value_heads, key_width, value_width = shapes["state_pool"]
    channels, _, taps = shapes["conv_weight"]
    return (
        ("KEY_HEADS", int(request.attributes["key_heads"])),
        ("VALUE_HEADS", value_heads),
        ("KEY_WIDTH", key_width),
        ("VALUE_WIDTH", value_width),
        ("CHANNELS", channels),
        ("TAPS", taps),
        ("ROW_WIDTH", shapes["rows"][1]),
        ("NODES", shapes["factor_pool"][1]),
        ("EPS", float(request.attributes["eps"])),
    )


def lower_chunks(request: LoweringRequest) -> Lowering | None:
    """Return the launches for complete chunks of a prompt; None if all rows use the row loop."""
    shapes = {name: info.shape for name, info in request.tensors.items()}
    _, value_heads, key_width, value_width = shapes["state_pool"]
    rows, batch = shapes["rows"][0], shapes["replay_path"][0]
    key_heads = int(request.attributes["key_heads"])
    sharers, places = value_heads // key_heads, min(rows // CHUNK, MAX_PLACES)
    half, single = ITEM_BYTES["bfloat16"], ITEM_BYTES["float32"]
    dots = 2 * CHUNK * (CHUNK + 1) + 2 * CHUNK + 2 * sharers * CHUNK
    operands = 2 * CHUNK * (key_width + _PADDING) * half
    preparing = -(-(dots * single + 4) // 16) * 16
    preparing += max(operands, sharers * CHUNK * CHUNK * single)
    column_ctas = COLUMN_CTAS if value_width % (16 * COLUMN_CTAS) == 0 else 1
    columns = value_width // column_ctas
    stage = 2 * CHUNK * (key_width + _PADDING) + CHUNK * (columns + _PADDING)
    stage += _PRODUCTS * CHUNK * (CHUNK + _PADDING) + 2 * _SCALES * CHUNK
    applying = half * (2 * stage + CHUNK * (columns + _PADDING))
    if (
        places == 0
        or value_width % 16
        or sharers > _MAX_SHARERS
        or max(preparing, applying) > request.target.shared_bytes_per_block
    ):
        return None
    constants = (*layer_constants(request), ("BATCH", batch), ("PLACES", places))
    preparing_kernel, applying_kernel, norm_kernel = (
        Kernel(_FOLDER, entry, (*constants, *more), f"{entry}.cu")
        for entry, more in (
            ("prepare_chunks", (("SHARED_BYTES", preparing),)),
            ("apply_chunks", (("SHARED_BYTES", applying), ("COLUMN_CTAS", column_ctas))),
            ("norm_chunks", ()),
        )
    )
    read = ("positions", "row_start", "state_slot", "replay_count")
    kept = ("workspace_keys", "workspace_values", "workspace_products", "workspace_scales")
    inputs = ("rows", "conv_weight", "decay_scale", "dt_bias", *read, "tail_pool")
    launches: list[OpLaunch] = []
    for first in range(0, rows // CHUNK, places):
        prepared: tuple[Argument, ...] = (*inputs, *kept, first)
        applied: tuple[Argument, ...] = (*read, "state_pool", "output", *kept, first)
        grid = (key_heads, min(places, rows // CHUNK - first), 1)
        ctas = (column_ctas * value_heads, batch, 1)
        launches += [
            OpLaunch(preparing_kernel, grid, _PREPARING_THREADS, preparing, prepared),
            OpLaunch(applying_kernel, ctas, 2 * columns, applying, applied),
        ]
    gated = ("rows", "norm", "positions", "row_start", "replay_count", "output")
    grid = (value_heads, rows // CHUNK, 1)
    launches.append(OpLaunch(norm_kernel, grid, _NORM_THREADS, single, gated))
    sizes = (
        2 * key_heads * CHUNK * key_width * half,
        value_heads * CHUNK * value_width * half,
        value_heads * _PRODUCTS * CHUNK * CHUNK * half,
        value_heads * _SCALES * CHUNK * single,
    )
    workspaces = (Workspace(n, places * size) for n, size in zip(kept, sizes, strict=True))
    return Lowering(tuple(launches), tuple(workspaces))
