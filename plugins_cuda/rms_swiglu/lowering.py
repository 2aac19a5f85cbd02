"""RmsSwiglu on a GPU: norm as prologue or launch, activation as epilogue."""

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
from specbuild.plugins_cuda.linear.streaming import PAIRS_PER_TILE, Dense, streaming
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.plugins_cuda.rms_swiglu.prefill import lower_prefill, prefill_tactics


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    dense = _dense(request)
    many = many_tokens(request, dense)
    cut = many.cut if many else streaming(request, dense)
    eps = float(request.attributes["eps"])
    rounding = rounding_of("RmsSwiglu", request.attributes)
    constants = (
        *cut.constants,
        ("HAS_BIAS", int("bias" in request.tensors)),
        ("NORM_ROUNDING", rounding_code(rounding)),
        ("EPS", eps),
    )
    launch = OpLaunch(
        dense_kernel("rms_swiglu", constants, many),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *(() if many else ("x", "norm")),
            *("gate_up", "bias", "h"),
            *((TOKENS, SUMS, ARRIVED) if many else ()),
            dense.rows,
        ),
    )
    if not many:
        return Lowering((launch,))
    norm = ready_tokens(dense, many, eps=eps, rounding=rounding)
    return Lowering((norm, launch), many.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Loads in flight and where they wait, rows a unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, _dense(request))


def _dense(request: LoweringRequest) -> Dense:
    rows, width = request.tensors["x"].shape
    tiles, blocks, storage = weight_tiles(request.tensors["gate_up"], width)
    # An MLP is so high that whole tiles balance.
    return Dense(
        "RmsSwiglu", tiles, blocks, rows, normed=True, storage=storage, unit=PAIRS_PER_TILE
    )
