"""Attention with heads of width 128 and more, in the emulator.

All decoding kernels give a token equal bits, and chunk boundaries do not change a prompt's. With
few query heads a KV head, rows share an mma.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_launches import Geometry, Launch, Text, expected
from emulation import has_compiler
from launch_branches import Branch, alone, fed_node, node, reverified, wide_node
from left_out import slow

from specbuild.builder.backends.cuda.tuning.kernel_case import values

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

LLAMA = Geometry(group=4, width=128, page_size=64)
QWEN = replace(LLAMA, group=8)
MAX_HEADS = replace(LLAMA, group=16)
SMALL_GROUP = replace(LLAMA, width=64, group=3)
# every width of wide_heads.cu, except in prompts
WIDEST = replace(LLAMA, width=256, group=6, page_size=16)
GLOBAL = replace(WIDEST, width=512, group=8)  # Gemma 4 without a window
MANY_PAGES = 1024  # with fewer pages, the default kernel is as fast


def close(result: np.ndarray, shape: Geometry, text: Text, position: int) -> None:
    """Compare a row's result with dense attention."""
    reference = expected(shape, text, position)
    np.testing.assert_allclose(values(result, torch.bfloat16), reference, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "shape",
    [
        LLAMA, replace(LLAMA, group=11),
        *slow(QWEN, MAX_HEADS, replace(LLAMA, window=40), replace(LLAMA, group=2, width=80)),
        replace(LLAMA, group=5, width=96, page_size=16), WIDEST, GLOBAL,
    ],
    ids=["4", "11", "8", "16", "window", "80", "96", "256", "512"],
)  # fmt: skip
@pytest.mark.parametrize(
    "position",
    [*(pytest.param(position, marks=pytest.mark.slow) for position in (2, 66)), 160],
)
def test_few_rows_have_the_bits_of_one_row(shape: Geometry, position: int) -> None:
    """Rows are in one warp or two of a tile, with unused rows, in trees and in batches."""
    text, other = Text.drawn(165, shape, 1), Text.drawn(165, shape, 2)
    reference = Launch(shape, [alone(text, position)]).attended()[0][-1]
    close(reference, shape, text, position)
    tree = node(text, position, (164, 163, 0, 162))
    bystander = node(other, 40, (3, 4, 5, 6))
    launches = {
        **{f"chain of {n}": ([reverified(text, position, n)], -1) for n in (2, 3, 4, 5, 8, 9)},
        "tree": ([tree], 5),
        "trees": ([alone(other, 7), tree, bystander, reverified(other, 33, 2)], 5),
        "two words": ([wide_node(text, position)], 4),
    }
    for name, (sequences, row) in launches.items():
        result = Launch(shape, sequences, seed=3).attended()
        sequence = next(i for i, s in enumerate(sequences) if s.text is text)
        np.testing.assert_array_equal(result[sequence][row], reference, err_msg=name)


def test_a_row_of_a_window_has_equal_bits_alone_and_in_a_pair() -> None:
    """The kernel of one row would spill registers here."""
    shape = replace(LLAMA, group=2, window=40)
    text = Text.drawn(165, shape, 1)
    sequences = [alone(text, 160), alone(text, 7)]
    one, two = (Launch(shape, sequences, tactic=t).attended() for t in ({}, {"rows": 2}))
    close(one[0][-1], shape, text, 160)
    for of_one, of_two in zip(one, two, strict=True):
        np.testing.assert_array_equal(of_two, of_one)


@pytest.mark.parametrize(
    "shape",
    [LLAMA, *slow(QWEN, MAX_HEADS), SMALL_GROUP],
    ids=["4", "8", "16", "3 of width 64"],
)
@pytest.mark.parametrize(
    "position",
    [pytest.param(2, marks=pytest.mark.slow), 64, pytest.param(300, marks=pytest.mark.slow)],
)
def test_a_token_has_equal_bits_alone_and_with_many_rows(shape: Geometry, position: int) -> None:
    """Cover rows of one warpgroup and of two, a tree, and sequences of few and of many rows."""
    text, other = Text.drawn(700, shape, 1), Text.drawn(700, shape, 2)
    reference = Launch(shape, [alone(text, position)], pages=MANY_PAGES).attended()[0][-1]
    close(reference, shape, text, position)
    tree = node(text, position, (164, 163, 0, 162))
    bystander = node(other, 40, (3, 4, 5, 6))
    launches = {
        "chain of 5": ([reverified(text, position, 5)], 7, -1),
        "chain of 13": ([reverified(text, position, 13)], 6, -1),
        "chain of 40": ([reverified(text, position, 40)], 11, -1),
        "few beside many": ([reverified(other, 533, 40), alone(text, position)], 1, -1),
        "tree": ([tree], 5, 5),
        "tree in a batch": ([alone(other, 7), tree, bystander, reverified(other, 533, 30)], 9, 5),
        "two words": ([wide_node(text, position)], 9, 4),
    }
    if position >= 10:
        launches["fed"] = ([fed_node(text, position, 8, (164, 163, 0, 162))], 0, 13)
    for name, (sequences, padding, row) in launches.items():
        launch = Launch(shape, sequences, padding_rows=padding, pages=MANY_PAGES, seed=padding)
        assert "attend_many" in launch.entries(), name
        sequence = next(i for i, s in enumerate(sequences) if s.text is text)
        np.testing.assert_array_equal(launch.attended()[sequence][row], reference, err_msg=name)


@pytest.mark.parametrize("page_size", [64, *slow(16)])
def test_many_rows_share_a_long_context(page_size: int) -> None:
    shape, pages = replace(LLAMA, page_size=page_size), MANY_PAGES * 64 // page_size
    text = Text.drawn(2600, shape, 3)
    reference = Launch(shape, [alone(text, 2500)], pages=pages).attended()[0][-1]
    for rows in (10, 20):
        chain = Launch(shape, [reverified(text, 2500, rows)], pages=pages, seed=rows)
        assert chain.entries() == ["attend_many", "join_slots"]
        np.testing.assert_array_equal(chain.attended()[0][-1], reference)


@pytest.mark.parametrize(
    ("shape", "rows", "entry"),
    [
        (LLAMA, 8, "attend_split"), (LLAMA, 9, "attend_many"),
        (QWEN, 4, "attend_split"), (QWEN, 5, "attend_many"),
    ],
)  # fmt: skip
def test_rows_of_two_warps_use_the_default_kernel(shape: Geometry, rows: int, entry: str) -> None:
    text = Text.drawn(60, shape, 5)
    launch = Launch(shape, [reverified(text, 40, rows)], pages=MANY_PAGES)
    assert launch.entries()[0] == entry


@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        *slow(QWEN, MAX_HEADS),
        SMALL_GROUP,
        replace(LLAMA, width=96),
        WIDEST,
        replace(LLAMA, width=256),
        *slow(GLOBAL),
    ],
    ids=["4", "8", "16", "3 of width 64", "96", "256", "4 of width 256", "512"],
)
@pytest.mark.parametrize("window", [0, 40])
def test_prefill_does_not_depend_on_chunk_boundaries(shape: Geometry, window: int) -> None:
    shape = replace(shape, window=window)
    text, other = Text.drawn(150, shape, 4), Text.drawn(60, shape, 5)

    def chunk(begin: int, end: int) -> Branch[Text]:
        return Branch(text, tuple(range(end)), end, tuple(range(begin, end)))

    launch = Launch(shape, [chunk(0, 150)], phase="prefill")
    full = not window and shape.width in (64, 128, 256)
    usual = "attend_full_prompt" if full else "attend_prompt"
    assert launch.entries() == ["attend_wide" if shape.width > WIDEST.width else usual]
    whole = launch.attended()[0]
    for position in (0, 1, 63, 64, 101, 149):
        close(whole[position], shape, text, position)
    parts = []
    for begin, end in ((0, 17), (17, 64), (64, 65), (65, 150)):
        beside = [Branch(other, tuple(range(21)), 21, tuple(range(2, 21))), chunk(begin, end)]
        cut = Launch(shape, beside, phase="prefill", padding_rows=2, seed=end)
        parts.append(cut.attended()[1])
    np.testing.assert_array_equal(np.concatenate(parts), whole)
