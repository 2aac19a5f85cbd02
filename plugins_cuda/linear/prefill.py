"""Linear over a prompt chunk: x as panels, then the tensor-core GEMM."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.prefill_gemm import (
    ROWS_PER_BLOCK,
    ROWS_STAGING,
    ROWS_THREADS,
    THREADS,
    ceil_div,
    dense_gemm,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """``x`` [T, K], packed ``weight``, ``bias``?, ``residual``? → ``y`` [T, N].

    SpecbuildError where the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "weight", ROWS_STAGING)
    constants = (
        *gemm.constants,
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("HAS_RESIDUAL", int("residual" in request.tensors)),
    )

    def kernel(entry: str) -> Kernel:
        return Kernel("linear", entry, constants, file="prefill.cu")

    panels = OpLaunch(
        kernel("linear_rows"),
        grid=(ceil_div(gemm.rows, ROWS_PER_BLOCK), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=0,
        arguments=("x", "workspace_panels", gemm.rows, gemm.panel_rows),
    )
    product = OpLaunch(
        kernel("linear_gemm"),
        grid=(min(gemm.tiles, request.target.multiprocessors), 1, 1),
        block=THREADS,
        shared_bytes=gemm.shared_bytes,
        arguments=("weight", "bias", "residual", "y", "workspace_panels", gemm.rows),
    )
    return Lowering((panels, product), (Workspace("workspace_panels", gemm.workspace_bytes),))


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "weight")
