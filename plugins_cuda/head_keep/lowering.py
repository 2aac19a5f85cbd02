"""HeadKeep on a GPU: the launches of HeadChoose, the first of which also writes logits."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.head_choose.lowering import lower_folds
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest
from specbuild.plugins_cuda.linear.many_tokens import MAX_PANEL_ROWS

# A flag per row in shared memory, if rows are panels.
_CUT_BYTES = 4 * MAX_PANEL_ROWS
_CUTS = ("top_k", "top_p", "floor", "logits")


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for more rows than a decode launch may have."""
    lowering = lower_folds("HeadKeep", request, more_bytes=_CUT_BYTES)
    *norm, folds, choice = lowering.launches
    at = folds.arguments.index("position") + 1
    arguments = (*folds.arguments[:at], *_CUTS, *folds.arguments[at:])
    suffix = folds.kernel.entry.removeprefix("head_folds")
    kernel = replace(folds.kernel, folder="head_keep", entry=f"head_keep{suffix}")
    launches = (
        *norm,
        replace(folds, kernel=kernel, arguments=arguments),
        replace(choice, kernel=replace(choice.kernel, folder="head_keep")),
    )
    return replace(lowering, launches=launches)
