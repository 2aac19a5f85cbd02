"""Dispatch tables: the first rule that accepts a launch selects its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class Rule(Generic[FactsT]):
    """One line of a dispatch table, as text and as a condition.

    ``form`` is the lowering's name for the rule. ``kernels`` are the files that it may launch, in
    order, and ``why`` is the reason for them. ``rows``, ``context``, ``width`` and ``pages``
    describe the condition ``takes``, given that no earlier rule matched; it does not test those
    that are empty.
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
    """Return the first rule that matches; the last rule of a table matches everything."""
    return next(rule for rule in table if rule.takes(facts))


def markdown_lines(table: Table[FactsT]) -> Iterator[str]:
    """Return the lines of the table in Markdown, for the developer documentation."""
    yield "| rows | context | width | pages | kernels | why |"
    yield "|---|---|---|---|---|---|"
    for rule in table:
        kernels = ", ".join(f"`{name}`" for name in rule.kernels)
        conditions = (rule.rows, rule.context, rule.width, rule.pages)
        yield f"| {' | '.join(text or 'any' for text in conditions)} | {kernels} | {rule.why} |"
