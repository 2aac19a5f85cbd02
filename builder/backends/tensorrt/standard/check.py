"""What engines of standard ops can compute of a model; the rest is refused before any work."""

from __future__ import annotations

from specbuild.builder.backends.unlowered_parts import require_lowered_parts
from specbuild.builder.families.registry import draft_family
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.feed_forward import ClampedSwiglu
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES

STANDARD = facts_of("tensorrt-rtx")


def require_standard_support(
    target: TargetGeometry, draft: DraftGeometry | None, requested: BuildOptions
) -> None:
    """SpecbuildError naming what a model or build has that no engine of standard ops computes."""
    title = LIBRARIES[STANDARD.name].title
    require_lowered_parts(target, f"engines of {title}")
    family = None if draft is None else draft_family(draft.architecture)
    if family is not None and STANDARD.name in family.refused_by:
        raise SpecbuildError(
            f"the draft is {family.title}'s, whose pass has no form for {title}; build with "
            "--backend cpu or cuda"
        )
    if draft is not None and (draft.latent_dims or draft.layers > 1):
        kind, others = "caches latents (MLA)", "cpu or cuda"
        if draft.layers > 1:
            kind, others = f"has {draft.layers} layers", "cpu"
        raise SpecbuildError(
            f"the draft {kind}, which has no form for {title}; build with --backend {others}, or "
            "without --draft"
        )
    if target.mla is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type}, whose attention (MLA) has no form for {title}; "
            "build with --backend cpu or cuda"
        )
    if target.moe is not None and not isinstance(target.moe.activation, ClampedSwiglu):
        raise SpecbuildError(
            f"the model is a {target.model_type}, whose experts have no form for {title}; build "
            "with --backend cpu or cuda"
        )
    if target.indexer is not None:
        raise SpecbuildError(
            f"--dsa has no form for {title}; build with --backend cpu or cuda, or with --no-dsa"
        )
    if requested.specpv.enabled:
        raise SpecbuildError(
            f"--specpv has no form for {title}; build with --backend cpu or cuda, or without it"
        )
