"""A suffix tree of bounded depth over token texts, with a count of each continuation.

A *point* is a position in the tree. The tree keeps a point for each suffix of the text that
occurred earlier, the longest suffix first. A new token moves every point along an edge. A point
whose edge has another token adds a leaf and is removed. The edge to a leaf refers to the text
itself, so it grows when the text grows. So the time per token is proportional to the length of the
longest match, and a text of n tokens has at most 2 n nodes. The construction is that of Ukkonen
(1995). The counts are those of SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Marks the end of a finished text; no token is negative.
END = -1


class Node:
    """A node and the edge to it: ``text[start : start + length]``.

    ``count`` is the number of suffixes that reach the edge. The edge of a leaf ends where its
    text ends, even before ``length``.
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

    def __init__(self, root: Node) -> None:
        self.node, self.offset, self.depth = root, 0, 0

    def advance(self, token: int) -> bool:
        """Move along ``token``; return False without moving if no edge has it."""
        node, offset = self.node, self.offset
        if offset < node.length:
            index = node.start + offset
            if index >= len(node.text) or node.text[index] != token:
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
    """The tokens after a point.

    ``shares[i]`` is the share of occurrences in which token i followed. ``matched`` is the number
    of tokens of the match before the point.
    """

    tokens: list[int]
    shares: list[float]
    matched: int


class SuffixTree:
    """A tree of strings of up to ``max_depth`` tokens; ``text`` is the only text that may grow."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node([], 0, 0, None, 0)
        self.tokens = 0
        # Changes when the nodes change, so that matchers recompute their points.
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
        points.append(Point(self.root))
        index = len(self.text) - 1
        moved: list[Point] = []
        for i, point in enumerate(points):
            previous = point.node
            if point.advance(token):
                if point.node is not previous:
                    point.node.count += 1
                if point.depth < self.max_depth:
                    moved.append(point)
                continue
            parent = previous
            if point.offset < previous.length:
                parent = self._split(previous, point.offset, (*moved, *points[i + 1 :]))
            max_length = self.max_depth - point.depth
            parent.children[token] = Node(self.text, index, max_length, parent, 1)
            self.version += 1
        self._points = moved

    def add(self, text: Iterable[int]) -> list[int]:
        """Add a finished text; return the handle to pass to :meth:`remove`."""
        assert not self.text, "a text is growing"
        for token in text:
            self.append(token)
        self.append(END)
        full_text, self.text, self._points = self.text, [], []
        return full_text

    def remove(self, full_text: list[int]) -> None:
        """Remove a text; ``full_text`` is the handle that :meth:`add` returned."""
        for start in range(len(full_text)):
            self._remove_suffix(full_text, start)
        self.tokens -= len(full_text)
        self.version += 1

    def _remove_suffix(self, full_text: list[int], start: int) -> None:
        node, index = self.root, start
        end = min(start + self.max_depth, len(full_text))
        while index < end:
            child = node.children[full_text[index]]
            child.count -= 1
            if child.count == 0:
                del node.children[full_text[index]]
                return
            if child.text is full_text:
                # Other texts still use this edge: copy its tokens.
                child.text = full_text[child.start : child.start + child.length]
                child.start = 0
            node, index = child, index + child.length

    def _split(self, node: Node, offset: int, others: Iterable[Point]) -> Node:
        """Split an edge at ``offset`` and return the new node; ``others`` are the other points.

        Points at or before the offset move to the new upper node, and no longer count for the
        lower one.
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
        self._points.append(Point(self._tree.root))
        depth = self._tree.max_depth
        self._points = [p for p in self._points if p.advance(token) and p.depth < depth]


def continuation(point: Point, own: Sequence[int], limit: int) -> Continuation:
    """Return the most frequent continuation of a point, up to ``limit`` tokens.

    Among children of equal count the newest is used. ``own`` is the growing text. Past its end, the
    proposed tokens count as its continuation, so a periodic text repeats its period.
    """
    node, offset = point.node, point.offset
    tokens: list[int] = []
    shares: list[float] = []
    while len(tokens) < limit:
        share = 1.0
        if offset >= node.length and node.children:
            child, share = _most_frequent_child(node)
            if child is None:
                break
            node, offset = child, 0
        index = node.start + offset
        if index < len(node.text):
            token = node.text[index]
        elif node.text is own and index - len(own) < len(tokens):
            token = tokens[index - len(own)]
        else:
            break
        if token == END:
            break
        tokens.append(token)
        shares.append(share)
        offset += 1
    return Continuation(tokens, shares, point.depth)


def _most_frequent_child(node: Node) -> tuple[Node | None, float]:
    """Return the most frequent child except END, and its share; None if all texts end here."""
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
