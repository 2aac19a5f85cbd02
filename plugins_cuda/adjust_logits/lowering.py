"""The launch of AdjustLogits."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch

_BLOCK = 256
_TOKENS_OF_A_THREAD = 4
_POINTERS = (
    "logits",
    "token_ids",
    "positions",
    "done",
    "changes",
    "min_position",
    "repetition",
    "frequency",
    "presence",
    "bias",
    "mask",
    "marks",
    "adjusted",
)


def lower(request: LoweringRequest) -> Lowering:
    """A thread for four tokens of a row."""
    rows, vocab = request.tensors["logits"].shape
    words = request.tensors["mask"].shape[1]
    launch = OpLaunch(
        kernel=Kernel("adjust_logits", "adjust_logits"),
        grid=(-(-vocab // (_BLOCK * _TOKENS_OF_A_THREAD)), rows, 1),
        block=_BLOCK,
        shared_bytes=0,
        arguments=(*_POINTERS, vocab, words),
    )
    return Lowering((launch,))
