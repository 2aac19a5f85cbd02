"""HeadChoose on a GPU: one launch reduces segments of the vocabulary, a second one each row."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.plugins_cuda.linear.many_tokens import TOKENS
from specbuild.plugins_cuda.rms_head.lowering import head_streaming

_FOLD_THREADS = 256
# The buffers in which 8 warps transpose a tile's logits, 32 rows at a time: 16 rows of 40 floats.
_FOLD_BYTES = 8 * 16 * 40 * 4
_FOLDS, _IDS = "workspace_folds", "workspace_ids"


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for more rows than a decode launch may have."""
    return lower_folds("HeadChoose", request)


def lower_folds(op: str, request: LoweringRequest, *, more_bytes: int = 0) -> Lowering:
    """Return the launches for ``op``; with panels they have ``more_bytes`` of shared memory.

    The last two launches are the reduction of the vocabulary and that of the segments.
    """
    rows = request.tensors["logit_rows"].shape[0]
    head = head_streaming(op, request, fold_bytes=_FOLD_BYTES + more_bytes)
    cut = head.cut
    kernel = Kernel("head_choose", f"head_folds{head.suffix}", cut.constants, head.file)
    segments = int(dict(cut.constants)["SEGMENTS"])
    before = ("weight",) if head.norm else ("x", "logit_rows", "norm", "weight")
    tokens = (TOKENS,) if head.norm else ()
    folds = OpLaunch(
        kernel,
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *before, "temperature", "seed", "position", *tokens, _FOLDS, _IDS, rows,
        ),
    )  # fmt: skip
    choice = OpLaunch(
        replace(kernel, entry="choose_of_folds", hot=False),
        grid=(rows, 1, 1),
        block=_FOLD_THREADS,
        shared_bytes=0,
        arguments=(_FOLDS, _IDS, "choice", "logprob"),
    )
    entries = rows * segments
    return Lowering(
        (*head.norm, folds, choice),
        (*head.workspaces, Workspace(_FOLDS, 16 * entries), Workspace(_IDS, 4 * entries)),
    )
