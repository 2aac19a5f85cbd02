"""LinearPartial on a GPU: Linear's launches, whose sums are stored as they are."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, OpLaunch, Tactic
from specbuild.plugins_cuda.linear.many_tokens import (
    ARRIVED,
    SUMS,
    TOKENS,
    dense_kernel,
    dense_tactics,
    many_tokens,
    ready_tokens,
)
from specbuild.plugins_cuda.linear.storage import weight_tiles
from specbuild.plugins_cuda.linear.streaming import Dense, streaming
from specbuild.plugins_cuda.linear_partial.prefill import lower_prefill, prefill_tactics


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    dense = _dense(request)
    many = many_tokens(request, dense)
    cut = many.cut if many else streaming(request, dense)
    launch = OpLaunch(
        dense_kernel("linear_partial", cut.constants, many),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *("x", "weight", "partial"),
            *((TOKENS if many.ready else None, SUMS, ARRIVED) if many else ()),
            dense.rows,
        ),
    )
    if not many or not many.ready:
        return Lowering((launch,), many.workspaces if many else ())
    return Lowering((ready_tokens(dense, many), launch), many.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Those of Linear."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, _dense(request))


def _dense(request: LoweringRequest) -> Dense:
    rows, width = request.tensors["x"].shape
    tiles, blocks, storage = weight_tiles(request.tensors["weight"], width)
    return Dense("LinearPartial", tiles, blocks, rows, normed=False, storage=storage)
