"""Suffix decoding in an engine: no weights and no graphs, but numbers and limits for chains."""

from __future__ import annotations

from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.drafters import SuffixDrafter
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError


def suffix_of(options: BuildOptions, *, max_seq_len: int) -> SuffixDrafter | None:
    """The drafter that ``--drafter suffix`` asks for, None where nothing does.

    SpecbuildError where an option of it is out of range or stands alone.
    """
    asked = options.suffix
    given = asked.given()
    if options.drafter is None:
        if given:
            flag = asked.flag(next(iter(given)))
            raise SpecbuildError(f"{flag} is of suffix decoding; add --drafter suffix")
        return None
    asked.check_bounds(given)
    usual = asked.usual()
    usual["max_tokens"] = min(usual["max_tokens"], max_seq_len - 1)
    return SuffixDrafter(**usual | given)


def with_suffix(shape: DraftShape, suffix: SuffixDrafter | None) -> DraftShape:
    """The largest tree of an engine, wide enough for the chains of suffix decoding too."""
    if suffix is None:
        return shape
    return DraftShape(
        max(shape.draft_top_k, 1),
        max(shape.draft_depth, suffix.max_tokens),
        max(shape.draft_tokens, suffix.max_tokens),
    )
