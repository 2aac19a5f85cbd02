"""The launch of TreeExpand."""

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

MAX_TOP_K = 16
_THREADS = 256
_LOGITS_OF_A_PART = 2048
_BEST, _SUMS, _ARRIVED = "workspace_best", "workspace_sums", "workspace_arrived"
_SAMPLING = ("temperature", "seed", "position")
_TENSORS = ("logits", "score", "d2t", "top_k", *_SAMPLING, "form", "tokens", "scores", "frontier")
_POINTERS = (*_TENSORS, _BEST, _SUMS, _ARRIVED)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one CTA per 2048 logits of a frontier node.

    K follows from the outputs, so ``top_k`` is not read. Raises SpecbuildError if K, or the nodes
    of a sequence, exceed ``MAX_TOP_K``.
    """
    rows, vocab = request.tensors["logits"].shape
    batch, k = request.tensors["frontier"].shape
    nodes = rows // batch
    if max(k, nodes) > MAX_TOP_K:
        raise SpecbuildError(
            f"draft_top_k is {max(k, nodes)}, but the CUDA kernels support at most {MAX_TOP_K} "
            f"nodes and children; build with --draft-top-k {MAX_TOP_K} or less"
        )
    parts = -(-vocab // _LOGITS_OF_A_PART)
    launch = OpLaunch(
        kernel=Kernel("tree_expand", "tree_expand"),
        grid=(parts, rows, 1),
        block=_THREADS,
        shared_bytes=0,
        arguments=(
            *_POINTERS,
            vocab,
            k,
            nodes,
            request.attributes["offset"],
            request.attributes["per_node"],
        ),
    )
    workspaces = (
        Workspace(_BEST, rows * parts * k * 8),
        Workspace(_SUMS, rows * parts * 2 * ITEM_BYTES["float32"]),
        Workspace(_ARRIVED, batch * ITEM_BYTES["int32"], zeroed=True),
    )
    return Lowering((launch,), workspaces)
