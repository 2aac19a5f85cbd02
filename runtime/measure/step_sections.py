"""Which ops of a program are the draft's, level by level, and which are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.engine_dir.plan import OpCall

TARGET, SELECT, ACCEPT = "target", "select", "accept"
LEVEL = "level "
HEADS = ("HeadChoose", "RmsHead")
_CHOICES = ("HeadChoose", "Choose")


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
    """The sections of a decoding step, in order; together they hold every op."""
    starts: list[tuple[str, int]] = []
    for i, call in enumerate(ops):
        name = _begins(call)
        if name is None and i > 0 and ops[i - 1].op in _CHOICES:
            name = ACCEPT
        if name is not None:
            starts.append((name, i))
    if not starts or starts[0][1] != 0:
        raise ValueError("the ops are not those of a decoding step")
    ends = [first for _, first in starts[1:]] + [len(ops)]
    return tuple(
        Section(name, first, end - 1) for (name, first), end in zip(starts, ends, strict=True)
    )


def _begins(call: OpCall) -> str | None:
    """The section that an op opens."""
    match call.op:
        case "ExtendInputs":
            return f"{LEVEL}1"
        case "LevelInputs":
            return SELECT if call.attributes["last"] else f"{LEVEL}{call.attributes['level'] + 1}"
        case "VerifyInputs":
            return TARGET
    return None
