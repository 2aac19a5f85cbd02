"""The launch of TreeSelect."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

MAX_CANDIDATES = 4096
_MAX_BLOCK = 1024
_POINTERS = (
    "tokens",
    "scores",
    "parents",
    "draft_tokens",
    "tree_tokens",
    "tree_parents",
    "depths",
    "ancestor_bits",
    "count",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one CTA per sequence.

    N follows from the outputs, so ``draft_tokens`` is not read. Raises SpecbuildError for a pool of
    more than ``MAX_CANDIDATES``.
    """
    batch, pool = request.tensors["tokens"].shape
    _, nodes, words = request.tensors["ancestor_bits"].shape
    if pool > MAX_CANDIDATES:
        raise SpecbuildError(
            f"the draft tree has {pool} candidates, but the CUDA kernels support at most "
            f"{MAX_CANDIDATES}; build with a smaller --draft-top-k or --draft-depth"
        )
    launch = OpLaunch(
        kernel=Kernel("tree_select", "tree_select"),
        grid=(batch, 1, 1),
        block=min(_MAX_BLOCK, -(-pool // 32) * 32),
        shared_bytes=nodes * ITEM_BYTES["int32"],
        arguments=(*_POINTERS, pool, nodes, words),
    )
    return Lowering((launch,))
