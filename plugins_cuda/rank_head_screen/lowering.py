"""RankHeadScreen on a GPU: HeadScreen's launches over a rank's tokens; the last one exchanges."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.head_screen import lowering as head_screen
from specbuild.plugins_cuda.launches import RANK, Lowering, LoweringRequest
from specbuild.plugins_cuda.rank_sum.lowering import inboxes
from specbuild.runtime.errors import SpecbuildError

FOLDER = "rank_head_screen"
# Words that a row sends: its best key, 64 bits.
ROW_WORDS = 2


def lower(request: LoweringRequest) -> Lowering:
    """Return the two launches; SpecbuildError for more rows than HeadScreen supports."""
    lowering = head_screen.lower(request)
    bounds, choice = lowering.launches
    ranks, rows = int(request.attributes["ranks"]), request.tensors["logit_rows"].shape[0]
    words = request.tensors["inbox"].shape[2]
    if words < rows * ROW_WORDS:
        raise SpecbuildError(
            f"RankHeadScreen: {rows} rows need {rows * ROW_WORDS} words of an inbox of {words}"
        )
    results = choice.arguments.index("choice")
    constants = (*choice.kernel.constants, ("RANKS", ranks), ("WORDS", words))
    launches = (
        replace(
            bounds,
            kernel=replace(bounds.kernel, folder=FOLDER, entry="rank_screen_tiles"),
            arguments=(*bounds.arguments, RANK),
        ),
        replace(
            choice,
            kernel=replace(
                choice.kernel, folder=FOLDER, entry="choose_of_screened_ranks", constants=constants
            ),
            arguments=(
                *choice.arguments[:results], *inboxes(ranks), "state", "fault",
                *choice.arguments[results:], RANK, int(request.attributes["exchange"]),
            ),
        ),
    )  # fmt: skip
    return replace(lowering, launches=launches)
