"""Tables that say which kernel runs: the first rule that takes a launch is its form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class Rule(Generic[FactsT]):
    """One line of a table, in words and as a condition.

    ``form`` is what the lowering calls it, ``kernels`` the files that it may launch, in order,
    ``why`` the reason for them. ``rows``, ``context``, ``width`` and ``pages`` say what ``takes``
    tests, of what no rule above took; an empty one is not tested.
    """

    form: str
    kernels: tuple[str, ...]
    why: str
    takes: Callable[[FactsT], bool]
    rows: str = ""
    context: str = ""
    width: str = ""
    pages: str = ""


Table = Sequence[Rule[FactsT]]


def first_rule(table: Table[FactsT], facts: FactsT) -> Rule[FactsT]:
    """The rule that decides; the last one of a table takes everything."""
    return next(rule for rule in table if rule.takes(facts))


def printed(table: Table[FactsT]) -> Iterator[str]:
    """The lines of the table in Markdown, for developers' pages."""
    yield "| rows | context | width | pages | kernels | why |"
    yield "|---|---|---|---|---|---|"
    for rule in table:
        kernels = ", ".join(f"`{name}`" for name in rule.kernels)
        said = (rule.rows, rule.context, rule.width, rule.pages)
        yield f"| {' | '.join(text or 'any' for text in said)} | {kernels} | {rule.why} |"
