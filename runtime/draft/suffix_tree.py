"""A suffix tree of bounded depth over texts of tokens, with how often each continuation followed.

Suffixes that stood in the text before are *points*: places in the tree, the longest first. Another
token moves every point along an edge, or ends it where it differs, which makes a leaf. A suffix
without a point is a leaf, whose edge is the text itself and grows with it. So a token costs as
many steps as the longest match has tokens, and a text of n tokens has 2 n nodes at most (Ukkonen,
1995; the counts as in SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Stands behind a text that is whole: no token is negative.
END = -1


class Node:
    """A node with the edge that leads to it: ``text[start : start + length]``.

    ``count`` is how many suffixes of texts have begun that edge. A leaf's edge ends where its
    text does.
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
        """Moves along ``token``; False, and nothing moves, where no edge has it."""
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
    """What follows a point: tokens, and the share of times that each followed those before it."""

    tokens: list[int]
    shares: list[float]
    matched: int


class SuffixTree:
    """Strings of up to ``max_depth`` tokens of texts; one text at most grows, ``text``."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node([], 0, 0, None, 0)
        self.tokens = 0
        # Changes with each change of structure: points that others hold are then placed anew.
        self.version = 0
        self.text: list[int] = []
        self._points: list[Point] = []

    @property
    def points(self) -> Sequence[Point]:
        """The suffixes of the growing text that stood before, the longest first."""
        return self._points

    def append(self, token: int) -> None:
        """One more token of the growing text."""
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
        """A whole text, which grows no more; what :meth:`remove` takes to forget it."""
        assert not self.text, "a text is growing"
        for token in text:
            self.append(token)
        self.append(END)
        full_text, self.text, self._points = self.text, [], []
        return full_text

    def remove(self, full_text: list[int]) -> None:
        """Forgets a text that :meth:`add` gave."""
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
                # Others read this edge on: it keeps its tokens, and lets go of the text.
                child.text = full_text[child.start : child.start + child.length]
                child.start = 0
            node, at = child, at + child.length

    def _split(self, node: Node, offset: int, others: Iterable[Point]) -> Node:
        """A node in the middle of an edge; ``others`` are the points beside the one that differs.

        Those that have come no further than it are on the upper part now, and have not begun the
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
    """The suffixes of a growing sequence that stand in another's tree, the longest first."""

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self._version = tree.version
        self._points: list[Point] = []
        self._recent: list[int] = []

    def append(self, token: int) -> None:
        """One more token of the sequence."""
        self._recent.append(token)
        if len(self._recent) > 2 * self._tree.max_depth:
            del self._recent[: -self._tree.max_depth]
        if self._version == self._tree.version:
            self._move(token)

    def points(self) -> Sequence[Point]:
        """The points now; placed anew where the tree has changed."""
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
    """What followed this point most often, up to ``most`` tokens; of equals the newest.

    Behind the end of ``own``, the text that grows, an edge goes on with what is proposed: so a text
    that repeats itself is followed across its end.
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
    """The child that was begun most often, and its share of all; None where texts end there."""
    total, best, limit = 0, None, 0
    for token, child in node.children.items():
        total += child.count
        if child.count >= limit and token != END:
            best, limit = child, child.count
    return best, limit / total


def strings(tree: SuffixTree) -> Iterator[tuple[tuple[int, ...], dict[int, int]]]:
    """Every branching string with the counts of what follows it, for checks and inspection."""
    stack: list[tuple[Node, tuple[int, ...]]] = [(tree.root, ())]
    while stack:
        node, string = stack.pop()
        if node.children:
            yield string, {token: child.count for token, child in node.children.items()}
        for child in node.children.values():
            label = tuple(child.text[child.start : child.start + child.length])
            stack.append((child, string + label))
