"""RankHeadChoose on a GPU: HeadChoose's launches over a rank's tokens; the last one exchanges."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.head_choose.lowering import lower_folds
from specbuild.plugins_cuda.launches import RANK, Lowering, LoweringRequest
from specbuild.plugins_cuda.rank_sum.lowering import inboxes
from specbuild.runtime.errors import SpecbuildError

# Words that a row sends: a fold, padded to pairs.
ROW_WORDS = 6


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for more rows than a decode launch may have."""
    lowering = lower_folds("RankHeadChoose", request)
    *norm, folds, choice = lowering.launches
    ranks, rows = int(request.attributes["ranks"]), request.tensors["logit_rows"].shape[0]
    words = request.tensors["inbox"].shape[2]
    if words < rows * ROW_WORDS:
        raise SpecbuildError(
            f"RankHeadChoose: {rows} rows need {rows * ROW_WORDS} words of an inbox of {words}"
        )
    suffix = folds.kernel.entry.removeprefix("head_folds")
    constants = (*folds.kernel.constants, ("RANKS", ranks), ("WORDS", words))
    kernel = replace(
        folds.kernel, folder="rank_head_choose", entry=f"rank_folds{suffix}", constants=constants
    )
    launches = (
        *norm,
        replace(folds, kernel=kernel, arguments=(*folds.arguments, RANK)),
        replace(
            choice,
            kernel=replace(kernel, entry="choose_of_ranks", hot=False),
            arguments=(
                *inboxes(ranks), "state", "fault", "choice", "logprob", *choice.arguments[:2],
                RANK, int(request.attributes["exchange"]),
            ),
        ),
    )  # fmt: skip
    return replace(lowering, launches=launches)
