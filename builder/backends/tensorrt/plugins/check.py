"""What engines of plugins have no form for, beside what no CUDA kernel computes."""

from __future__ import annotations

from specbuild.builder.engine.sizes import EnginePlan
from specbuild.builder.options import BuildOptions
from specbuild.runtime.errors import SpecbuildError


def refuse_foreign_options(asked: BuildOptions) -> None:
    """SpecbuildError names an option that plugins have no form for."""
    for given, option, why in (
        (asked.tensorrt.weight_streaming, "--weight-streaming", "its engines hold no weights"),
        (asked.specpv.enabled, "--specpv", "no profile has the rows of partial views"),
    ):
        if given:
            raise SpecbuildError(
                f"--backend {asked.backend} does not know {option}: {why}; leave it out"
            )


def refuse_lists(plan: EnginePlan, backend: str) -> None:
    """SpecbuildError for DSA, whose lists no plugin takes."""
    if plan.dsa is not None:
        raise SpecbuildError(
            f"--dsa is not built for --backend {backend}; build with --backend cuda or cpu, or "
            "with --no-dsa"
        )
