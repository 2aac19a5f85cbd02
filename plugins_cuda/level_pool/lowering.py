"""The launch of LevelPool."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.tree_expand.lowering import MAX_TOP_K
from specbuild.runtime.errors import SpecbuildError

_WARP = 32
_POINTERS = ("tokens", "scores", "pool_tokens", "pool_scores", "pool_parents")


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one CTA per sequence, with a thread per candidate of a level.

    Raises SpecbuildError for more than ``MAX_TOP_K`` tokens per level, or more levels than that.
    """
    batch, entries = request.tensors["tokens"].shape
    depth = int(request.attributes["depth"])
    k = entries // depth
    if max(k, depth) > MAX_TOP_K:
        raise SpecbuildError(
            f"a one-pass draft has {depth} levels of {k} tokens, the CUDA kernels support at most "
            f"{MAX_TOP_K} of {MAX_TOP_K}; build with a smaller --draft-top-k or --draft-depth"
        )
    launch = OpLaunch(
        kernel=Kernel("level_pool", "level_pool"),
        grid=(batch, 1, 1),
        block=-(-max(k * k, entries) // _WARP) * _WARP,
        shared_bytes=0,
        arguments=(*_POINTERS, depth, k),
    )
    return Lowering((launch,))
