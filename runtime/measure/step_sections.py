"""The sections of a decoding step: consecutive op calls with one section name in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from specbuild.runtime.engine_dir.plan import OpCall


@dataclass(frozen=True)
class Section:
    """Ops ``first`` … ``last`` of a step, inclusive.

    ``level 1`` ingests the accepted tokens and drafts the first level, and ``level l`` the further
    ones. ``select`` selects the tree's nodes, ``target`` verifies them and samples, and ``accept``
    compares the samples and updates the state.
    """

    name: str
    first: int
    last: int


def step_sections(ops: Sequence[OpCall]) -> tuple[Section, ...]:
    """Return the sections of a decoding step, in order; together they include every op.

    Raises ValueError if an op has no section, so that the program is not a step.
    """
    sections: list[Section] = []
    for name, calls in groupby(ops, key=lambda call: call.section):
        first = sections[-1].last + 1 if sections else 0
        sections.append(Section(name, first, first + len(list(calls)) - 1))
    if not all(section.name for section in sections) or not sections:
        raise ValueError("the ops are not those of a decoding step")
    return tuple(sections)
