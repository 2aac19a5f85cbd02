"""LazyGatedDelta in ragged steps: chains of different lengths have the bits of single rows."""

from __future__ import annotations

import pytest
from emulation import has_compiler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_lazy_gated_delta import NODES, by_kernel, by_reference, check_story

from specbuild.plugins_cuda.lazy_gated_delta.cases import chain


@st.composite
def ragged_stories(draw: st.DrawFn) -> list[list[tuple[list[int], int]]]:
    """Steps in which both sequences verify chains of their own lengths, or one has no rows."""

    def turn() -> list[tuple[list[int], int]]:
        counts = draw(st.tuples(st.integers(0, NODES), st.integers(0, NODES)).filter(any))
        return [(chain(n), draw(st.integers(0, max(n - 1, 0)))) for n in counts]

    return [turn() for _ in range(draw(st.integers(1, 4)))]


RAGGED_STORY = [
    [(chain(1), 0), (chain(5), 3)],
    [(chain(0), 0), (chain(2), 1)],
    [(chain(6), 5), (chain(1), 0)],
]


@settings(max_examples=25, deadline=None)
@given(ragged_stories(), st.integers(0, 10**6), st.integers(0, 3))
@example(RAGGED_STORY, 1, 2)
@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_the_kernel_has_the_bits_of_single_rows(
    story: list[list[tuple[list[int], int]]], seed: int, padding: int
) -> None:
    """As in a ragged step, whose last rows may belong to no sequence."""
    check_story(by_kernel, story, seed, padding=padding)


@settings(max_examples=25, deadline=None)
@given(ragged_stories(), st.integers(0, 10**6), st.integers(0, 3))
@example(RAGGED_STORY, 1, 2)
def test_the_reference_has_the_bits_of_single_rows(
    story: list[list[tuple[list[int], int]]], seed: int, padding: int
) -> None:
    check_story(by_reference, story, seed, padding=padding)
