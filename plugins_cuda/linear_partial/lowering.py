"""LinearPartial on a GPU: Linear's launches with unrounded sums."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.prefill import prefill_tactics
from specbuild.plugins_cuda.linear.projection import lower_product, projection_of
from specbuild.plugins_cuda.prefill_gemm import UNSTAGED, dense_gemm, dense_launches


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches for ``x`` [T, K], packed ``weight`` → ``partial`` [T, N].

    Raises SpecbuildError for a decode launch of more than 256 rows, a weight that is packed for
    another K, and an unknown tactic.
    """
    if request.phase == "prefill":
        return dense_launches(
            request,
            dense_gemm(request, "weight", UNSTAGED),
            "linear_partial",
            constants=(),
            rows=("x",),
            product=("weight", "partial"),
        )
    return lower_product(
        request,
        projection_of("LinearPartial", request),
        folder="linear_partial",
        constants=(),
        arguments=("x", "weight", "partial"),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics of Linear."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("LinearPartial", request))
