"""Checks before the build which models the engines of standard ops support."""

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
    """Raise SpecbuildError for a part of a model or build that these engines do not support."""
    title = LIBRARIES[STANDARD.name].title
    require_lowered_parts(target, f"engines of {title}")
    family = None if draft is None else draft_family(draft.architecture)
    if family is not None and STANDARD.name in family.refused_by:
        raise SpecbuildError(
            f"the draft is a {family.title} draft, which {title} does not support; build with "
            "--backend cpu or cuda"
        )
    if draft is not None and (draft.latent_dims or draft.layers > 1):
        kind, alternatives = "caches latents (MLA)", "cpu or cuda"
        if draft.layers > 1:
            kind, alternatives = f"has {draft.layers} layers", "cpu"
        raise SpecbuildError(
            f"the draft {kind}, which {title} does not support; build with --backend "
            f"{alternatives}, or without --draft"
        )
    if target.mla is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type}, whose attention (MLA) {title} does not support; "
            "build with --backend cpu or cuda"
        )
    if target.moe is not None and not isinstance(target.moe.activation, ClampedSwiglu):
        raise SpecbuildError(
            f"the model is a {target.model_type}, whose experts {title} does not support; build "
            "with --backend cpu or cuda"
        )
    if target.indexer is not None:
        raise SpecbuildError(
            f"{title} does not support --dsa; build with --backend cpu or cuda, or with --no-dsa"
        )
    if requested.specpv.enabled:
        raise SpecbuildError(
            f"{title} does not support --specpv; build with --backend cpu or cuda, or without it"
        )
