"""The suffix tree, compared with a search of the texts by brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.draft.suffix_tree import (
    END,
    Matcher,
    SuffixTree,
    continuation,
    strings,
)

TEXT = st.lists(st.integers(0, 3), max_size=40)
DEPTH = st.integers(2, 7)


def followers(texts: Sequence[Sequence[int]], string: Sequence[int]) -> Counter[int]:
    """Count each token after ``string`` in the texts; END after the last one."""
    found: Counter[int] = Counter()
    n = len(string)
    for text in texts:
        for i in range(len(text) - n):
            if list(text[i : i + n]) == list(string):
                found[text[i + n]] += 1
    return found


def check_counts(tree: SuffixTree, texts: Sequence[Sequence[int]]) -> None:
    """Check that every branching string has the counts of its followers, and none is missing."""
    found = dict(strings(tree))
    for string, counts in found.items():
        assert counts == followers(texts, string), string
    branching = {
        tuple(text[i : i + n])
        for text in texts
        for i in range(len(text))
        for n in range(1, tree.max_depth)
        if len(followers(texts, text[i : i + n])) > 1
    }
    assert branching <= found.keys()


def longest_match(texts: Sequence[Sequence[int]], tail: Sequence[int], depth: int) -> int:
    """Return the longest suffix of ``tail``, shorter than ``depth``, that has a follower."""
    lengths = range(1, min(depth, len(tail) + 1))
    return max((n for n in lengths if followers(texts, tail[len(tail) - n :])), default=0)


@given(TEXT, DEPTH)
@settings(deadline=None, max_examples=150)
def test_a_growing_text_has_the_counts_of_a_search(text: list[int], depth: int) -> None:
    tree = SuffixTree(depth)
    for i, token in enumerate(text):
        tree.append(token)
        depths = [point.depth for point in tree.points]
        assert depths == sorted(depths, reverse=True)
        assert max(depths, default=0) == longest_match([text[: i + 1]], text[: i + 1], depth)
    check_counts(tree, [text])


@given(st.lists(TEXT, max_size=5), DEPTH, st.data())
@settings(deadline=None, max_examples=150)
def test_texts_are_added_and_removed(
    texts: list[list[int]], depth: int, data: st.DataObject
) -> None:
    tree = SuffixTree(depth)
    held = [(text, tree.add(text)) for text in texts]
    check_counts(tree, [[*text, END] for text in texts])
    while held:
        _, whole = held.pop(data.draw(st.integers(0, len(held) - 1)))
        tree.remove(whole)
        assert tree.tokens == sum(len(text) + 1 for text, _ in held)
        check_counts(tree, [[*text, END] for text, _ in held])
    assert not tree.root.children


@given(st.lists(TEXT, max_size=4), TEXT, DEPTH, st.integers(0, 40))
@settings(deadline=None, max_examples=150)
def test_a_matcher_follows_changes_of_another_tree(
    texts: list[list[int]], tail: list[int], depth: int, change_at: int
) -> None:
    tree = SuffixTree(depth)
    first = [tree.add(text) for text in texts[:2]]
    matcher = Matcher(tree)
    held = [[*text, END] for text in texts[:2]]
    for i, token in enumerate(tail):
        matcher.append(token)
        if i == change_at:
            held = [[*text, END] for text in texts[1:]]
            for text in texts[2:]:
                tree.add(text)
            if first:
                tree.remove(first[0])
        deepest = max((point.depth for point in matcher.points()), default=0)
        assert deepest == longest_match(held, tail[: i + 1], depth)


@given(TEXT, DEPTH)
@settings(deadline=None, max_examples=200)
def test_proposes_the_most_frequent_continuation(text: list[int], depth: int) -> None:
    tree = SuffixTree(depth)
    for token in text:
        tree.append(token)
    for point in tree.points:
        string = list(text[len(text) - point.depth :])
        found = continuation(point, tree.text, depth)
        for token, share in zip(found.tokens, found.shares, strict=True):
            counts = followers([text], string)
            if len(string) >= depth or not counts:
                break
            assert counts[token] == max(counts.values())
            assert share == pytest.approx(counts[token] / counts.total())
            string.append(token)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_text_that_repeats_is_followed_across_its_end(period: int) -> None:
    tree, text = SuffixTree(8), [i % period for i in range(3 * period + 4)]
    for token in text:
        tree.append(token)
    found = continuation(tree.points[0], tree.text, 30)
    assert found.tokens == [(len(text) + i) % period for i in range(30)]
    assert found.shares == [1.0] * 30


def test_nodes_are_bounded_by_the_text() -> None:
    """At most 2 n nodes for n tokens, and n for random tokens of a large vocabulary."""
    for base in (1, 2, 3, 50):
        tree = SuffixTree(24)
        text = [(i * i * 7 + i // 5) % base for i in range(600)]
        for token in text:
            tree.append(token)
        assert sum(1 for _ in _nodes(tree)) <= 2 * len(text)


def _nodes(tree: SuffixTree):  # type: ignore[no-untyped-def]
    stack = [tree.root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def test_of_equal_continuations_the_newest_is_proposed() -> None:
    tree = SuffixTree(4)
    for token in (1, 2, 1, 3, 1):
        tree.append(token)
    (point,) = (point for point in tree.points if point.depth == 1)
    assert continuation(point, tree.text, 1).tokens == [3]
