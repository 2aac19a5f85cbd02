"""The launch of LevelInputs."""

from __future__ import annotations

from specbuild.plugins_cuda.extend_inputs.lowering import row_vectors
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

_POINTERS = (
    "tokens",
    "scores",
    "frontier",
    "hidden",
    "parent_rows",
    "parent_bits",
    "length",
    "done",
    "limit",
    "page_table",
    "pool_tokens",
    "pool_scores",
    "pool_parents",
    "frontier_pool",
    "token_ids",
    "hidden_rows",
    "positions",
    "row_start",
    "row_slot",
    "write_slot",
    "tree_start",
    "ancestor_bits",
    "logit_rows",
    "score",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return a launch of one CTA per frontier node, and one for row_start unless the level is the
    last.

    Sizes are arguments, so that buckets and levels share a kernel.

    Raises SpecbuildError if the candidates of the level do not fit in the pool.
    """
    shapes = {name: info.shape for name, info in request.tensors.items()}
    level, depth, page_size, last = (
        int(request.attributes[name]) for name in ("level", "depth", "page_size", "last")
    )
    (batch, candidates), k = shapes["tokens"], shapes["frontier"][1]
    pool = shapes["pool_tokens"][1]
    held = k + (level - 1) * k * k
    if candidates != (k if level == 1 else k * k) or held > pool:
        raise SpecbuildError(
            f"LevelInputs: got {candidates} candidates at level {level} and a pool of {pool}, "
            f"expected {k} at level 1, {k * k} after it, and a pool of at least {held} (K = {k})"
        )
    words = max(1, -(-k * (depth - 1) // 32))
    sizes = (batch, k, candidates, pool, words, row_vectors(request, "hidden"))
    launch = OpLaunch(
        kernel=Kernel("level_inputs", "level_inputs"),
        grid=(batch * k + (0 if last else 1), 1, 1),
        block=256,
        shared_bytes=0,
        arguments=(*_POINTERS, *sizes, shapes["page_table"][1], page_size, level, last),
    )
    return Lowering((launch,))
