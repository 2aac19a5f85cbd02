"""RmsQueryLatent on a GPU: norm as prologue or launch, rotation and cache writing as epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch, Tactic
from specbuild.plugins_cuda.linear.many_tokens import (
    ARRIVED,
    SUMS,
    TOKENS,
    dense_tactics,
    many_tokens,
    normed_tokens,
)
from specbuild.plugins_cuda.linear.storage import weight_tiles
from specbuild.plugins_cuda.linear.streaming import Dense, streaming
from specbuild.plugins_cuda.rms_query_latent.prefill import lower_prefill, prefill_tactics


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError for a decode launch of more than 256 rows."""
    if request.phase == "prefill":
        return lower_prefill(request)
    tensors, attributes = request.tensors, request.attributes
    dense = _dense(request)
    many = many_tokens(request, dense)
    cut = many.cut if many else streaming(request, dense)
    latent = tensors["c_pool"].shape[3]
    constants = (
        *cut.constants,
        ("HAS_NORM", int(dense.normed)),
        ("HAS_BIAS", int("bias" in tensors)),
        ("Q_HEADS", attributes["q_heads"]),
        ("HEAD_DIM", tensors["q"].shape[2]),
        ("LATENT", latent),
        ("EPS", attributes["eps"]),
    )
    launch = OpLaunch(
        Kernel(
            "rms_query_latent",
            "rms_query_latent_of_many" if many else "rms_query_latent",
            constants,
        ),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *(("x",) if many else ("x", "norm")),
            *("weight", "bias", "cos", "sin", "positions", "write_slot", "c_pool", "q"),
            *((TOKENS, SUMS, ARRIVED) if many else ()),
            dense.rows,
        ),
    )
    if not many:
        return Lowering((launch,))
    if not dense.normed:
        return Lowering((launch,), many.workspaces)
    norm = normed_tokens(dense, many.token_tiles, eps=float(attributes["eps"]), rounding="gpt_oss")
    return Lowering((norm, launch), many.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Loads in flight and where they wait, rows a unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, _dense(request))


def _dense(request: LoweringRequest) -> Dense:
    tensors = request.tensors
    rows, width = tensors["x"].shape
    tiles, blocks, storage = weight_tiles(tensors["weight"], width)
    return Dense("RmsQueryLatent", tiles, blocks, rows, normed="norm" in tensors, storage=storage)
