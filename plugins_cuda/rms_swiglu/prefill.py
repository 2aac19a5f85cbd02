"""RmsSwiglu over a prompt chunk: normed x as panels, then the tensor-core GEMM."""

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
    PAIRS_STAGING,
    ROWS_PER_BLOCK,
    ROWS_THREADS,
    THREADS,
    ceil_div,
    dense_gemm,
    dense_tactics,
)


def lower_prefill(request: LoweringRequest) -> Lowering:
    """``x`` [T, K], packed ``gate_up`` → ``h`` [T, I].

    SpecbuildError where the weight is packed for another K, or the tactic is unknown.
    """
    gemm = dense_gemm(request, "gate_up", PAIRS_STAGING)
    constants = (*gemm.constants, ("EPS", float(request.attributes["eps"])))

    def kernel(entry: str) -> Kernel:
        return Kernel("rms_swiglu", entry, constants, file="prefill.cu")

    panels = OpLaunch(
        kernel("rms_swiglu_rows"),
        grid=(ceil_div(gemm.rows, ROWS_PER_BLOCK), 1, 1),
        block=ROWS_THREADS,
        shared_bytes=0,
        arguments=("x", "norm", "workspace_panels", gemm.rows, gemm.panel_rows),
    )
    product = OpLaunch(
        kernel("rms_swiglu_gemm"),
        grid=(min(gemm.tiles, request.target.multiprocessors), 1, 1),
        block=THREADS,
        shared_bytes=gemm.shared_bytes,
        arguments=("gate_up", "h", "workspace_panels", gemm.rows),
    )
    return Lowering((panels, product), (Workspace("workspace_panels", gemm.workspace_bytes),))


def prefill_tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Tokens of a tile, and whether wgmma computes it."""
    return dense_tactics(request, "gate_up")
