"""The launches of ChooseCut: those of Choose, which return early for unrestricted rows."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.choose.lowering import lower as lower_choose
from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest

_CUTS = ("temperature", "top_k", "top_p", "floor")


def lower(request: LoweringRequest) -> Lowering:
    """Return three launches with a CTA per 8192 logits; rows are independent."""
    lowering = lower_choose(request)
    summarise, cut_tails, choose = lowering.launches
    logits, *rest = summarise.arguments
    launches = (
        replace(
            summarise,
            kernel=Kernel("choose_cut", "summarise_cut_parts"),
            arguments=(logits, *_CUTS, *rest),
        ),
        cut_tails,
        replace(choose, kernel=Kernel("choose_cut", "choose_cut")),
    )
    return replace(lowering, launches=launches)
