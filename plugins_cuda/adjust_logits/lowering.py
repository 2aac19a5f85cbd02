"""The launch of AdjustLogits."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.engine_dir.plan import ITEM_BYTES

_BLOCK = 256
_TOKENS_OF_A_THREAD = 4
_POINTERS = (
    "logits",
    "row_tokens",
    "ancestor_bits",
    "positions",
    "changes",
    "forced",
    "min_position",
    "repetition",
    "frequency",
    "presence",
    "bias",
    "mask",
    "marks",
    "row_start",
    "raw",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch with a thread per four tokens of a row."""
    rows, vocab = request.tensors["logits"].shape
    sequences, words = request.tensors["mask"].shape
    bits = request.tensors.get("ancestor_bits")
    # In a ragged step, one sequence may have most of the rows.
    nodes = rows if "row_start" in request.tensors else rows // sequences
    launch = OpLaunch(
        kernel=Kernel("adjust_logits", "adjust_logits"),
        grid=(-(-vocab // (_BLOCK * _TOKENS_OF_A_THREAD)), rows, 1),
        block=_BLOCK,
        shared_bytes=nodes * ITEM_BYTES["int32"],
        arguments=(
            *_POINTERS,
            vocab,
            words,
            nodes,
            sequences,
            0 if bits is None else bits.shape[1],
        ),
    )
    return Lowering((launch,))
