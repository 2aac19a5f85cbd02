"""The arena of a program: live buffers do not share bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.backends.cuda.plan.memory_placement import ALIGNMENT, Span, place


def spans() -> st.SearchStrategy[list[Span]]:
    """Draw lifetimes in a program of 40 ops, with sizes that are aligned and unaligned."""

    def span(size: int, first: int, length: int) -> Span:
        return Span(size, first, first + length)

    sizes = st.one_of(st.integers(1, 2000), st.sampled_from([256, 512, 4096, 100_000]))
    one = st.builds(span, sizes, st.integers(0, 39), st.integers(0, 39))
    return st.lists(one, max_size=60)


@given(spans())
def test_live_buffers_do_not_overlap(pieces: list[Span]) -> None:
    offsets, total = place(pieces)
    for op in range(80):
        live = sorted(
            (offset, offset + piece.bytes)
            for offset, piece in zip(offsets, pieces, strict=True)
            if piece.first <= op <= piece.last
        )
        for (_, end), (start, _) in pairwise(live):
            assert end <= start
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(o + p.bytes <= total for o, p in zip(offsets, pieces, strict=True))


@given(spans())
def test_the_arena_is_at_most_the_sum_of_all_buffers(pieces: list[Span]) -> None:
    _, total = place(pieces)
    assert total <= sum(-(-piece.bytes // ALIGNMENT) * ALIGNMENT for piece in pieces)


def test_buffers_with_disjoint_lifetimes_share_memory() -> None:
    chain = [Span(1000, i, i + 1) for i in range(50)]
    offsets, total = place(chain)
    assert total == 2 * 1024
    assert set(offsets) == {0, 1024}


def test_equal_buffers_give_equal_placements() -> None:
    pieces = [Span(300 + i % 7, i % 5, i % 5 + i % 3) for i in range(40)]
    assert place(pieces) == place(list(pieces))
