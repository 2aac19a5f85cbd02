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

# What RankMoe has beside RmsMoe.
_EXCHANGE_INPUTS = ("inbox", "state", "fault")
_EXCHANGE_ATTRIBUTES = ("ranks", "exchange")
# RmsMoe's last launch, when decoding and over prompts: what takes its place, and what that reads.
_ADDING = {
    "add_experts": ("add_ranks", "kernel.cu", ("workspace_partial",)),
    "moe_combine": (
        "combine_ranks",
        "prefill.cu",
        ("workspace_shares", "workspace_position", "workspace_rows"),
    ),
}


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError where RmsMoe's kernels cannot compute it."""
    of_rank = rms_moe.lower(_of_rank(request), slices=_slices(request))
    *launches, adding = of_rank.launches
    return Lowering((*launches, _exchange(request, adding)), of_rank.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Those of RmsMoe over the rank's columns."""
    return rms_moe.tactics(_of_rank(request), slices=_slices(request))


def _slices(request: LoweringRequest) -> int:
    """Warps that share K of a tile of gate/up, by ranks and K alone.

    A rank has 1 / ranks of the tiles: with as many slices, up to 4, as many warps have work as on
    one GPU. Each slice has a stage at least.
    """
    hidden, bf16 = request.tensors["x"].shape[1], in_bf16(request.tensors["gate_up"].dtype)
    stages, slices = gate_up_stages(hidden, bf16=bf16), min(int(request.attributes["ranks"]), 4)
    while (slices - 1) * -(-stages // slices) >= stages > 0:
        slices //= 2
    return slices


def _of_rank(request: LoweringRequest) -> LoweringRequest:
    """RmsMoe as it would be without other ranks."""
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
