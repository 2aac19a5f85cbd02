"""DsaCheck on a GPU: one CTA per sequence."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES

# Entries of a list that a lane checks, and the warps of a CTA.
OF_A_LANE = 10
FEWEST_WARPS, MAX_WARPS = 4, 32
_ARGUMENTS = (
    "selected",
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "positions",
    "budget",
    "checked",
    "violations",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch for any number of rows."""
    rows, views, held = request.tensors["selected"].shape
    words = request.tensors["ancestor_bits"].shape[1]
    numbers = (
        int(request.attributes[name]) for name in ("threshold", "first_tokens", "recent_tokens")
    )
    batch = request.tensors["budget"].shape[0]
    rows_of_a_sequence = max(1, rows // batch)
    pieces = rows_of_a_sequence * views * -(-held // (32 * OF_A_LANE))
    threads = 32 * max(FEWEST_WARPS, min(1 << (pieces - 1).bit_length(), MAX_WARPS))
    constants = (("WORDS", words), ("THREADS", threads), ("OF_A_LANE", OF_A_LANE))
    launch = OpLaunch(
        Kernel("dsa_check", "check_lists", constants),
        grid=(batch, 1, 1),
        block=threads,
        shared_bytes=ITEM_BYTES["int32"] * rows * views,
        arguments=(*_ARGUMENTS, rows, rows_of_a_sequence, views, held, *numbers),
    )
    return Lowering((launch,))
