"""The drafter of an engine that proposes on the host: its settings, and limits for its chains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbuild.builder.option_group import HostDrafterOptions
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.drafters.record import HostRecord
from specbuild.runtime.engine_dir.drafters.registry import RECORDS
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError


def host_drafter_of(options: BuildOptions, *, max_seq_len: int) -> HostRecord | None:
    """The drafter that ``--drafter`` names, with its options; None without one.

    Raises SpecbuildError if an option is out of range, or belongs to a drafter that is not named.
    """
    given: dict[str, Any] = {}
    for group in vars(options).values():
        if not isinstance(group, HostDrafterOptions):
            continue
        named = group.given()
        if named and options.drafter != group.PREFIX:
            raise SpecbuildError(
                f"{group.flag(next(iter(named)))} is of {group.PANEL.lower()}; add --drafter "
                f"{group.PREFIX}"
            )
        group.check_bounds(named)
        given |= named
    if options.drafter is None:
        return None
    kind = RECORDS[options.drafter]
    assert issubclass(kind, HostRecord)
    record = kind()
    fitting = min(record.max_tokens, max_seq_len - 1)
    return replace(record, **{"max_tokens": fitting} | given)


def holding_chains(shape: DraftShape, longest: int) -> DraftShape:
    """The largest tree of an engine, wide enough for host chains of ``longest`` tokens too."""
    if not longest:
        return shape
    return DraftShape(
        max(shape.draft_top_k, 1),
        max(shape.draft_depth, longest),
        max(shape.draft_tokens, longest),
    )


def longest_host_chain(
    shape: DraftShape, drafter: HostRecord | None, *, guide_chain: int, max_seq_len: int
) -> int:
    """The longest chain that the host proposes: the drafter's, or what guides force.

    With draft models of trees up to ``shape``, forced chains do not need further cache slots.
    """
    if drafter is not None:
        return drafter.max_tokens
    fitting = min(shape.draft_depth, shape.draft_tokens) or max_seq_len - 1
    return min(guide_chain, fitting)
