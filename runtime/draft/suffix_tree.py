"""A suffix tree of bounded depth over token texts, with a count of each continuation.

Suffixes that occurred earlier are *points*: positions in the tree, the longest first. A new token
moves every point along an edge. If the edge differs, the point ends and adds a leaf. The edge of a
leaf is the text itself and grows with it. So a token costs as many steps as the longest match has
tokens, and a text of n tokens has at most 2 n nodes (Ukkonen, 1995; the counts as in
SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Marks the end of a finished text; no token is negative.
END = -1


class Node:
    """A node and the edge to it: ``text[start : start + length]``.

    ``count`` is the number of suffixes that reach the edge. A leaf's edge ends with its text.
    """

    __slots__ = ("children", "count", "length", "parent", "start", "text")

    def __init__(
        self, text: list[int], start: int, length: int, parent: Node | None, count: int
    ) -> None:
        self.text, self.start, self.length = text, start, length
        self.parent, self.count = parent, count
        self.children: dict[int, Node] = {}


class Point:
    """A string of ``depth`` tokens in the tree: ``offset`` tokens along the edge to ``node``."""

    __slots__ = ("depth", "node", "offset")

    def __init__(self, node: Node, offset: int, depth: int) -> None:
        self.node, self.offset, self.depth = node, offset, depth

    def advance(self, token: int) -> bool:
        """Move along ``token``; return False without moving if no edge has it."""
        node, offset = self.node, self.offset
        if offset < node.length:
            place = node.start + offset
            if place >= len(node.text) or node.text[place] != token:
                return False
            self.offset = offset + 1
        else:
            child = node.children.get(token)
            if child is None:
                return False
            self.node, self.offset = child, 1
        self.depth += 1
        return True


@dataclass(frozen=True)
class Continuation:
    """The tokens after a point, and the share of occurrences in which each followed."""

    tokens: list[int]
    shares: list[float]
    matched: int


class SuffixTree:
    """A tree of strings of up to ``max_depth`` tokens; at most one text, ``text``, grows."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node([], 0, 0, None, 0)
        self.tokens = 0
        # Changes with the structure, so that matchers recompute their points.
        self.version = 0
        self.text: list[int] = []
        self._points: list[Point] = []

    @property
    def points(self) -> Sequence[Point]:
        """The suffixes of the growing text that occurred earlier, the longest first."""
        return self._points

    def append(self, token: int) -> None:
        """Append a token to the growing text."""
        self.text.append(token)
        self.tokens += 1
        points = self._points
        points.append(Point(self.root, 0, 0))
        place = len(self.text) - 1
        moved: list[Point] = []
        for i, point in enumerate(points):
            before = point.node
            if point.advance(token):
                if point.node is not before:
                    point.node.count += 1
                if point.depth < self.max_depth:
                    moved.append(point)
                continue
            at = before
            if point.offset < before.length:
                at = self._split(before, point.offset, (*moved, *points[i + 1 :]))
            left = self.max_depth - point.depth
            at.children[token] = Node(self.text, place, left, at, 1)
            self.version += 1
        self._points = moved

    def add(self, text: Iterable[int]) -> list[int]:
        """Add a finished text; return the handle that :meth:`remove` takes."""
        assert not self.text, "a text is growing"
        for token in text:
            self.append(token)
        self.append(END)
        full_text, self.text, self._points = self.text, [], []
        return full_text

    def remove(self, full_text: list[int]) -> None:
        """Remove a text by the handle from :meth:`add`."""
        for start in range(len(full_text)):
            self._remove_suffix(full_text, start)
        self.tokens -= len(full_text)
        self.version += 1

    def _remove_suffix(self, full_text: list[int], start: int) -> None:
        node, at = self.root, start
        end = min(start + self.max_depth, len(full_text))
        while at < end:
            child = node.children[full_text[at]]
            child.count -= 1
            if child.count == 0:
                del node.children[full_text[at]]
                return
            if child.text is full_text:
                # Other texts still use this edge: copy its tokens.
                child.text = full_text[child.start : child.start + child.length]
                child.start = 0
            node, at = child, at + child.length

    def _split(self, node: Node, offset: int, others: Iterable[Point]) -> Node:
        """Split an edge at ``offset`` and return the new node; ``others`` are the other points.

        Points up to the offset move to the upper part, and no longer count for the lower one.
        """
        assert node.parent is not None
        upper = Node(node.text, node.start, offset, node.parent, node.count)
        node.parent.children[node.text[node.start]] = upper
        upper.children[node.text[node.start + offset]] = node
        node.parent = upper
        node.start += offset
        node.length -= offset
        node.count -= 1
        for point in others:
            if point.node is not node:
                continue
            if point.offset <= offset:
                point.node = upper
                node.count -= 1
            else:
                point.offset -= offset
        return upper


class Matcher:
    """The suffixes of a growing sequence that occur in another tree, the longest first."""

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self._version = tree.version
        self._points: list[Point] = []
        self._recent: list[int] = []

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._recent.append(token)
        if len(self._recent) > 2 * self._tree.max_depth:
            del self._recent[: -self._tree.max_depth]
        if self._version == self._tree.version:
            self._move(token)

    def points(self) -> Sequence[Point]:
        """Return the points, recomputed if the tree has changed."""
        if self._version != self._tree.version:
            self._version, self._points = self._tree.version, []
            for token in self._recent[-self._tree.max_depth :]:
                self._move(token)
        return self._points

    def _move(self, token: int) -> None:
        self._points.append(Point(self._tree.root, 0, 0))
        depth = self._tree.max_depth
        self._points = [p for p in self._points if p.advance(token) and p.depth < depth]


def continuation(point: Point, own: Sequence[int], limit: int) -> Continuation:
    """Return the most frequent continuation of a point, up to ``limit`` tokens.

    Of equal counts the newest is used. Past the end of the growing text ``own`` the continuation
    repeats the proposed tokens, so a periodic text continues past its end.
    """
    node, offset = point.node, point.offset
    tokens: list[int] = []
    shares: list[float] = []
    while len(tokens) < limit:
        share = 1.0
        if offset >= node.length and node.children:
            child, share = _likeliest(node)
            if child is None:
                break
            node, offset = child, 0
        place = node.start + offset
        if place < len(node.text):
            token = node.text[place]
        elif node.text is own and place - len(own) < len(tokens):
            token = tokens[place - len(own)]
        else:
            break
        if token == END:
            break
        tokens.append(token)
        shares.append(share)
        offset += 1
    return Continuation(tokens, shares, point.depth)


def _likeliest(node: Node) -> tuple[Node | None, float]:
    """Return the most frequent child and its share; None if texts mostly end here."""
    total, best, max_count = 0, None, 0
    for token, child in node.children.items():
        total += child.count
        if child.count >= max_count and token != END:
            best, max_count = child, child.count
    return best, max_count / total


def strings(tree: SuffixTree) -> Iterator[tuple[tuple[int, ...], dict[int, int]]]:
    """Yield every branching string with the counts of its continuations, for tests."""
    stack: list[tuple[Node, tuple[int, ...]]] = [(tree.root, ())]
    while stack:
        node, string = stack.pop()
        if node.children:
            yield string, {token: child.count for token, child in node.children.items()}
        for child in node.children.values():
            label = tuple(child.text[child.start : child.start + child.length])
            stack.append((child, string + label))
