"""The launch of LevelPool."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.tree_expand.lowering import MAX_TOP_K
from specbuild.runtime.errors import SpecbuildError

_WARP = 32
_POINTERS = ("tokens", "scores", "pool_tokens", "pool_scores", "pool_parents")


def lower(request: LoweringRequest) -> Lowering:
    """One CTA per sequence, a thread per candidate of a level.

    Raises SpecbuildError where a level has more than ``MAX_TOP_K`` tokens, or there are more
    levels.
    """
    batch, entries = request.tensors["tokens"].shape
    depth = int(request.attributes["depth"])
    k = entries // depth
    if max(k, depth) > MAX_TOP_K:
        raise SpecbuildError(
            f"a draft of one pass has {depth} levels of {k} tokens, the CUDA kernels make trees of "
            f"at most {MAX_TOP_K} of {MAX_TOP_K}; build with a smaller --draft-top-k or "
            "--draft-depth"
        )
    launch = OpLaunch(
        kernel=Kernel("level_pool", "level_pool"),
        grid=(batch, 1, 1),
        block=-(-max(k * k, entries) // _WARP) * _WARP,
        shared_bytes=0,
        arguments=(*_POINTERS, depth, k),
    )
    return Lowering((launch,))
