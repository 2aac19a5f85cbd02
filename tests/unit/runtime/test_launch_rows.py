"""Launches of prompts have an efficient size, and remain small while sequences decode."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.decode.prompt_launches import (
    CHEAP_PADDING_ROWS,
    launch_rows,
    prompt_launches,
)

SIZES = (64, 256, 1024, 2048, 4096, 8192)
mosts = st.sampled_from(SIZES)


@given(st.integers(1, 60_000), mosts)
def test_a_prompt_is_read_once_by_launches_that_are_well_filled(tokens: int, most: int) -> None:
    launches = prompt_launches(tokens, most)
    assert sum(launches) == tokens and min(launches) > 0
    for rows in launches:
        program = next(size for size in SIZES if size >= rows)
        assert program <= most
        assert program <= CHEAP_PADDING_ROWS or 4 * rows >= 3 * program
    assert all(a >= b for a, b in pairwise(launches))


@given(st.integers(1, 60_000), st.integers(1, 10_000))
def test_sequences_that_decode_wait_for_no_large_launch(wanted: int, most: int) -> None:
    assert launch_rows(wanted, most, decoding=True) == min(most, 2048)
    assert launch_rows(wanted, most) <= most


@pytest.mark.parametrize(
    ("tokens", "most", "launches"),
    [
        (8192, 8192, [8192]),
        (6144, 8192, [6144]),
        (6143, 8192, [4096, 2047]),
        (3072, 8192, [3072]),
        (3000, 8192, [2048, 952]),
        (20_000, 8192, [8192, 8192, 3616]),
        (8192, 2048, [2048] * 4),
        (300, 256, [256, 44]),
    ],
)
def test_examples(tokens: int, most: int, launches: list[int]) -> None:
    assert prompt_launches(tokens, most) == launches
