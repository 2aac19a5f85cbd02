"""DsaCheck on a GPU: a CTA per sequence."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
)
from specbuild.runtime.plan import ITEM_BYTES

THREADS = 1024
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
    """One launch for any number of rows."""
    rows, views, held = request.tensors["selected"].shape
    words = request.tensors["ancestor_bits"].shape[1]
    numbers = (
        int(request.attributes[name]) for name in ("threshold", "first_tokens", "recent_tokens")
    )
    batch = request.tensors["budget"].shape[0]
    launch = OpLaunch(
        Kernel("dsa_check", "check_lists", (("WORDS", words), ("THREADS", THREADS))),
        grid=(batch, 1, 1),
        block=THREADS,
        shared_bytes=ITEM_BYTES["int32"] * rows * views,
        arguments=(*_ARGUMENTS, rows, max(1, rows // batch), views, held, *numbers),
    )
    return Lowering((launch,))
