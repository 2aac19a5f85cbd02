"""The positions of one token in a launch: alone, in a chain of rows, or as a tree node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

Ints = tuple[int, ...]
TREE_SLOTS = 7
TextT = TypeVar("TextT")


@dataclass(frozen=True)
class Branch(Generic[TextT]):
    """The used slots and the rows of one sequence: the token of each slot, and which are rows.

    ``lineages[i]`` are the tree bits of row i.
    """

    text: TextT
    tokens: Ints
    tree_start: int
    rows: Ints
    lineages: tuple[Ints, ...] = ()

    def words(self, row: int) -> int:
        """Return the ancestor bits of a row as one number."""
        return sum(1 << bit for bit in (self.lineages[row] if self.lineages else ()))


def alone(text: TextT, position: int) -> Branch[TextT]:
    """Decode the token after all preceding tokens were committed."""
    return Branch(text, tuple(range(position + 1)), position + 1, (position,))


def reverified(text: TextT, position: int, rows: int) -> Branch[TextT]:
    """Put the token last in a chain of rows."""
    first = max(0, position + 1 - rows)
    return Branch(text, tuple(range(position + 1)), position + 1, tuple(range(first, position + 1)))


def node(text: TextT, position: int, decoys: Ints) -> Branch[TextT]:
    """Put the token last on a path of three, at tree slots 0, 3 and 5, with other nodes between."""
    start = position - 2
    tokens = (*range(start), start, *decoys[:2], start + 1, decoys[2], start + 2, decoys[3])
    lineages = ((0,), (0, 1), (0, 2), (0, 3), (0, 3, 4), (0, 3, 5), (0, 1, 6))
    return Branch(text, tokens, start, tuple(range(start, start + TREE_SLOTS)), lineages)


def fed_node(text: TextT, position: int, rows: int, decoys: Ints) -> Branch[TextT]:
    """Put ``node`` after re-verified tokens: row ``rows`` + 5."""
    tree = node(text, position, decoys)
    fed = tuple(range(tree.tree_start - rows, tree.tree_start))
    return replace(tree, rows=(*fed, *tree.rows), lineages=(*[()] * rows, *tree.lineages))


def wide_node(text: TextT, position: int) -> Branch[TextT]:
    """Put the token after 34 other nodes, so that its bits are in two words; 5 rows."""
    start = position - 1
    tokens = (*range(start), start, *[0] * 34, start + 1)
    lineages = ((0,), (0, 7), (0, 7, 9), (0, 34), (0, 35))
    rows = tuple(start + lineage[-1] for lineage in lineages)
    return Branch(text, tokens, start, rows, lineages)
