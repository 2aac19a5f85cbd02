"""The sections of a decoding step: runs of op calls that the plan gives one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from specbuild.runtime.engine_dir.plan import OpCall


@dataclass(frozen=True)
class Section:
    """Ops ``first`` … ``last`` of a step, both included.

    ``level 1`` takes up what was accepted and drafts the first tokens, ``level l`` those behind
    them; ``select`` keeps the tree's nodes, ``target`` verifies them up to its own choices,
    ``accept`` compares and moves the state on.
    """

    name: str
    first: int
    last: int


def step_sections(ops: Sequence[OpCall]) -> tuple[Section, ...]:
    """The sections of a decoding step, in order; together they hold every op.

    Raises ValueError where an op belongs to none: the program is not a step.
    """
    found: list[Section] = []
    for name, calls in groupby(ops, key=lambda call: call.section):
        first = found[-1].last + 1 if found else 0
        found.append(Section(name, first, first + len(list(calls)) - 1))
    if not all(section.name for section in found) or not found:
        raise ValueError("the ops are not those of a decoding step")
    return tuple(found)
