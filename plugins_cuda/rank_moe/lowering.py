"""RankMoe on a GPU: RmsMoe's launches over a rank's columns; the last one exchanges the sums."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.launches import (
    RANK,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
)
from specbuild.plugins_cuda.rank_sum.lowering import inboxes, require_inbox
from specbuild.plugins_cuda.rank_sum.rounds import ROUND_ROWS, cut_of
from specbuild.plugins_cuda.rms_moe import lowering as rms_moe
from specbuild.plugins_cuda.rms_moe.packing import gate_up_stages, in_bf16
from specbuild.runtime.errors import SpecbuildError

# Inputs and attributes of RankMoe that RmsMoe does not have.
_EXCHANGE_INPUTS = ("inbox", "state", "fault")
_EXCHANGE_ATTRIBUTES = ("ranks", "exchange")
# RmsMoe's last launches in decoding and prefill, with their replacements and the workspaces read.
_ADDING = {
    "add_experts": ("add_ranks", "kernel.cu", ("workspace_partial",)),
    "moe_combine": (
        "combine_ranks",
        "prefill.cu",
        ("workspace_shares", "workspace_position", "workspace_rows"),
    ),
}


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError if RmsMoe's kernels do not support the request."""
    if not request.attributes["residual"]:
        raise SpecbuildError(
            "RankMoe got residual 0, its CUDA kernels always add x: build for one GPU."
        )
    of_rank = rms_moe.lower(_of_rank(request), slices=_slices(request))
    *launches, adding = of_rank.launches
    return Lowering((*launches, _exchange(request, adding)), of_rank.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return the tactics of RmsMoe for the rank's columns."""
    return rms_moe.tactics(_of_rank(request), slices=_slices(request))


def _slices(request: LoweringRequest) -> int:
    """Return the number of warps that share K of a gate/up tile, by ranks and K only.

    A rank has 1 / ranks of the tiles. With as many slices (at most 4), as many warps have work as
    on one GPU. Each slice has at least one stage.
    """
    hidden, bf16 = request.tensors["x"].shape[1], in_bf16(request.tensors["gate_up"].dtype)
    stages, slices = gate_up_stages(hidden, bf16=bf16), min(int(request.attributes["ranks"]), 4)
    while (slices - 1) * -(-stages // slices) >= stages > 0:
        slices //= 2
    return slices


def _of_rank(request: LoweringRequest) -> LoweringRequest:
    """Return the request of RmsMoe on a single rank."""
    tensors = {n: t for n, t in request.tensors.items() if n not in _EXCHANGE_INPUTS}
    attributes = {n: v for n, v in request.attributes.items() if n not in _EXCHANGE_ATTRIBUTES}
    return replace(request, tensors=tensors, attributes=attributes)


def _exchange(request: LoweringRequest, adding: OpLaunch) -> OpLaunch:
    tensors, attributes = request.tensors, request.attributes
    rows, width = tensors["y"].shape
    ranks = int(attributes["ranks"])
    words = require_inbox("RankMoe", request)
    cut = cut_of(rows, width, ranks)
    entry, file, read = _ADDING[adding.kernel.entry]
    constants = (
        ("RANKS", ranks), ("WIDTH", width), ("WORDS", words), ("ROWS", ROUND_ROWS),
        ("THREADS", cut.threads), ("PAIRS", cut.pairs),
        ("TOP_K", int(attributes["top_k"]) + int(attributes["shared"])),
        ("SEQUENCES", tensors["row_start"].shape[0] - 1),
    )  # fmt: skip
    return OpLaunch(
        Kernel("rank_moe", entry, constants, file=file),
        grid=(cut.ctas, 1, 1),
        block=cut.threads,
        shared_bytes=0,
        arguments=(
            "x", "row_start", *inboxes(ranks), "state", "fault", "y", *read,
            rows, RANK, int(attributes["exchange"]),
        ),
    )  # fmt: skip
