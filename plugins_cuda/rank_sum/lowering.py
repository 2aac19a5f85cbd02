"""RankSum on a GPU: stores to the inboxes of all other ranks, in rounds of up to 256 rows."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    RANK,
    Argument,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    PeerPointer,
)
from specbuild.plugins_cuda.rank_sum.rounds import ROUND_ROWS, cut_of
from specbuild.runtime.errors import SpecbuildError

MAX_RANKS = 8


def inboxes(ranks: int) -> tuple[Argument, ...]:
    """Return a rank's own inbox, and those of the others by distance."""
    peers = [PeerPointer(k, "inbox") if k < ranks else None for k in range(1, MAX_RANKS)]
    return ("inbox", *peers)


def require_inbox(op: str, request: LoweringRequest) -> int:
    """Return the words of a sender in the inbox; SpecbuildError if rows of ``y`` do not fit."""
    rows, width = request.tensors["y"].shape
    words = request.tensors["inbox"].shape[2]
    if width % 2 or words < min(rows, ROUND_ROWS) * width:
        raise SpecbuildError(
            f"{op}: got rows of {width} values and an inbox of {words} words, expected an even "
            f"width and an inbox for {ROUND_ROWS} rows"
        )
    return words


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch, for any number of rows."""
    rows, width = request.tensors["y"].shape
    ranks = int(request.attributes["ranks"])
    words = require_inbox("RankSum", request)
    cut = cut_of(rows, width, ranks)
    constants = (
        ("RANKS", ranks), ("WIDTH", width), ("WORDS", words), ("ROWS", ROUND_ROWS),
        ("THREADS", cut.threads), ("PAIRS", cut.pairs),
    )  # fmt: skip
    launch = OpLaunch(
        Kernel("rank_sum", "rank_sum", constants),
        grid=(cut.ctas, 1, 1),
        block=cut.threads,
        shared_bytes=0,
        arguments=(
            "partial", "bias", "residual", *inboxes(ranks), "state", "fault", "y",
            rows, RANK, int(request.attributes["exchange"]),
        ),
    )  # fmt: skip
    return Lowering((launch,))
