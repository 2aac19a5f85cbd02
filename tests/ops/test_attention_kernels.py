"""The attention kernels in the emulator: a token's bits do not depend on the rest of its launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_launches import Geometry, Launch, Text, expected
from emulation import has_compiler, tensor_info
from launch_branches import Branch, alone, fed_node, node, reverified, wide_node
from left_out import slow

from specbuild.builder.backends.cuda.tuning.kernel_case import values
from specbuild.plugins_cuda.dispatch import first_rule
from specbuild.plugins_cuda.launches import LoweringRequest, Tactic, Target, TensorInfo
from specbuild.plugins_cuda.paged_tree_attention import geometry
from specbuild.plugins_cuda.paged_tree_attention.dispatch import TABLE, Facts
from specbuild.plugins_cuda.paged_tree_attention.op import OP
from specbuild.runtime.errors import SpecbuildError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")


POSITIONS = (0, 1, 33, 63, 64, 65, 66, 127, 128, 160)


@pytest.mark.parametrize("window", [0, 5, *slow(128)])
def test_a_token_has_equal_bits_alone_in_a_chain_in_a_tree_and_in_a_batch(window: int) -> None:
    """Check every launch shape and alignment, with ancestors in scattered slots."""
    shape = Geometry(window=window)
    text, other = Text.drawn(165, shape, 1), Text.drawn(165, shape, 2)
    for position in POSITIONS:
        single = alone(text, position)
        bystander = node(other, 40, (3, 4, 5, 6))
        launches = {
            "chain": Launch(shape, [reverified(text, position, 4)]),
            "long chain": Launch(shape, [reverified(text, position, 9)], padding_rows=3, seed=1),
            "batch": Launch(shape, [bystander, alone(other, 90), single], seed=2),
        }
        if position >= 2:
            tree = node(text, position, (164, 163, 0, 162))
            batch = [alone(other, 7), tree, bystander, reverified(other, 33, 2)]
            launches |= {
                "tree": Launch(shape, [tree], seed=3),
                "tree, more rows a warp": Launch(shape, [tree], padding_rows=4, seed=7),
                "tree and rows": Launch(shape, [tree, bystander], tactic={"stages": 2}, seed=4),
                "tree in a batch": Launch(shape, batch, padding_rows=1, seed=5),
            }
            launches["two words"] = Launch(shape, [wide_node(text, position)], seed=6)
        reference = Launch(shape, [single]).attended()[0][-1]
        np.testing.assert_allclose(
            values(reference, torch.bfloat16), expected(shape, text, position), atol=1e-2, rtol=2e-2
        )
        for name, launch in launches.items():
            sequence = next(i for i, s in enumerate(launch.sequences) if s.text is text)
            rows = launch.attended()[sequence]
            row = {"tree": 5, "two words": 4}.get(name, 5 if "tree" in name else -1)
            np.testing.assert_array_equal(rows[row], reference, err_msg=f"{name} at {position}")


@pytest.mark.parametrize("sequences", [2, 3, 7])
def test_rows_of_a_window_share_keys_if_there_are_many_sequences(sequences: int) -> None:
    """Two, three or four rows share a warp: as many as let all CTAs run at once."""
    shape = Geometry(window=40)
    text = Text.drawn(165, shape, 1)
    branches = [reverified(text, 50 + 13 * i, 5) for i in range(sequences)]
    for branch, rows in zip(branches, Launch(shape, branches).attended(), strict=True):
        single = alone(text, branch.rows[-1])
        np.testing.assert_array_equal(rows[-1], Launch(shape, [single]).attended()[0][-1])


@pytest.mark.parametrize(("page_size", "words"), [(4, 4), (16, 4), (128, 1), *slow((4, 3))])
def test_the_copy_of_a_tree_spans_pages_of_any_size(page_size: int, words: int) -> None:
    """Test with as many pages as a warp has lanes, with more, and with a part of one page."""
    shape = Geometry(page_size=page_size, words=words)
    text = Text.drawn(200, shape, 11)
    for position in (33, 100, 127, 129):
        tree = node(text, position, (164, 163, 0, 162))
        reference = Launch(shape, [alone(text, position)]).attended()[0][-1]
        np.testing.assert_array_equal(Launch(shape, [tree]).attended()[0][5], reference)


MANY = Geometry(group=8, width=64, page_size=64)
MANY_PAGES = 1024  # with fewer pages, the default kernel is as fast


@pytest.mark.parametrize("position", [63, 650, *slow(0, 1, 33, 64, 65, 66, 127, 128, 160, 300)])
def test_a_token_has_equal_bits_alone_and_with_many_rows(position: int) -> None:
    """Put the token last in a chain, in a tree, and with sequences of few and of many rows."""
    text, other = Text.drawn(700, MANY, 1), Text.drawn(700, MANY, 2)
    reference = Launch(MANY, [alone(text, position)], pages=MANY_PAGES).attended()[0][-1]
    dense = expected(MANY, text, position)
    np.testing.assert_allclose(values(reference, torch.bfloat16), dense, atol=1e-2, rtol=2e-2)
    launches = {
        "chain of 5": Launch(MANY, [reverified(text, position, 5)], padding_rows=4),
        "more than a CTA of few takes": Launch(
            MANY,
            [alone(other, 7), reverified(text, position, 11)],
            padding_rows=14 - min(position + 1, 11),
            seed=9,
        ),
        "chain of 12": Launch(MANY, [reverified(text, position, 12)], padding_rows=11),
        "chain of 13": Launch(
            MANY, [reverified(text, position, 13)], padding_rows=16 - min(position + 1, 13), seed=10
        ),
        "chain of 20": Launch(MANY, [reverified(text, position, 20)], padding_rows=11, seed=3),
        "chain of 40": Launch(MANY, [reverified(text, position, 40)], padding_rows=11, seed=4),
        "few beside many": Launch(
            MANY, [reverified(other, 533, 40), alone(text, position)], padding_rows=1, seed=5
        ),
    }
    rows = dict.fromkeys(launches, -1)
    if position >= 2:
        tree = node(text, position, (164, 163, 0, 162))
        bystander = node(other, 40, (3, 4, 5, 6))
        launches |= {
            "tree": Launch(MANY, [tree], padding_rows=5, seed=6),
            "tree in a batch": Launch(
                MANY, [alone(other, 7), tree, bystander, reverified(other, 533, 30)],
                padding_rows=9, seed=7,
            ),
            "two words": Launch(MANY, [wide_node(text, position)], padding_rows=9, seed=8),
            "small trees": Launch(MANY, [bystander, tree, alone(other, 7)], seed=11),
        }  # fmt: skip
        rows |= {"tree": 5, "tree in a batch": 5, "two words": 4, "small trees": 5}
    if position >= 10:
        fed = Launch(MANY, [fed_node(text, position, 8, (164, 163, 0, 162))], seed=12)
        launches["tree behind 8 rows"], rows["tree behind 8 rows"] = fed, 13
    for name, launch in launches.items():
        sequence = next(i for i, s in enumerate(launch.sequences) if s.text is text)
        attended = replace(launch, pages=MANY_PAGES).attended()[sequence]
        assert "attend_many" in replace(launch, pages=MANY_PAGES).entries()
        np.testing.assert_array_equal(attended[rows[name]], reference, err_msg=name)


def test_many_rows_with_over_16_sequences_and_an_odd_group() -> None:
    """The number of threads of a result is then no multiple of the warp size."""
    shape = replace(MANY, group=7)
    text = Text.drawn(60, shape, 5)
    sequences = [reverified(text, 12 + 2 * i, 12) for i in range(20)]
    launch = Launch(shape, sequences, pages=MANY_PAGES)
    assert "join_slots" in launch.entries()
    for i, rows in enumerate(launch.attended()):
        reference = Launch(shape, [alone(text, 12 + 2 * i)], pages=MANY_PAGES).attended()[0]
        np.testing.assert_array_equal(rows[-1], reference[-1], err_msg=str(i))


def test_one_sequence_may_have_most_rows_of_a_launch() -> None:
    """One sequence re-verifies its buffer, so it has more than the mean of 4 rows."""
    text = Text.drawn(60, MANY, 5)
    launch = Launch(MANY, [reverified(text, 40, 4)] * 16, pages=MANY_PAGES)
    assert launch.entries() == ["attend_split"]
    uneven = replace(launch, uneven=True)
    assert uneven.entries() == ["attend_few", "attend_many", "join_slots"]
    assert OP.tactics is not None
    assert OP.tactics(uneven.request()) == ({},) != OP.tactics(launch.request())
    np.testing.assert_array_equal(uneven.attended(), launch.attended())
    sequences = [alone(text, 3), reverified(text, 50, 30), *[alone(text, 20 + i) for i in range(6)]]
    rows = Launch(MANY, sequences, pages=MANY_PAGES, uneven=True).attended()
    reference = [Launch(MANY, [s], pages=MANY_PAGES).attended()[0] for s in sequences]
    for result, single in zip(rows, reference, strict=True):
        np.testing.assert_array_equal(result, single)


def test_row_tiles_are_distributed_over_idle_multiprocessors() -> None:
    """Three CTAs share the tiles of a split:

    1 KV head, 32 splits, 14 tiles, 100 multiprocessors.
    """
    text = Text.drawn(300, MANY, 5)
    sequences = [reverified(text, 299 - 40 * i, 5 + i) for i in range(7)]
    target = Target(arch="sm_90a", multiprocessors=100)
    launch = Launch(MANY, sequences, pages=MANY_PAGES, target=target)
    inputs = launch.inputs()
    assert launch.lowering(inputs).launches[0].grid == (32, 1, 3)
    for i, rows in enumerate(launch.attended()):
        reference = Launch(MANY, [alone(text, 299 - 40 * i)], pages=MANY_PAGES).attended()[0]
        np.testing.assert_array_equal(rows[-1], reference[-1], err_msg=str(i))


@pytest.mark.parametrize(
    ("batch", "rows", "pages", "uses_many_rows_kernel"),
    [(1, 12, 128, True), (1, 12, 127, False), (1, 8, 1024, True), (1, 8, 1023, False),
     (1, 4, 4096, False), (8, 5, 384, True), (8, 5, 256, False), (2, 8, 511, False)],
)  # fmt: skip
def test_long_contexts_use_the_many_rows_kernel(
    batch: int, rows: int, pages: int, uses_many_rows_kernel: bool
) -> None:
    """Up to 16384 tokens, tactics are measured; for few sequences the default kernel is faster."""
    text = Text.drawn(60, MANY, 5)
    launch = Launch(MANY, [reverified(text, 40, rows)] * batch, pages=pages)
    assert ("attend_many" in launch.entries()) == uses_many_rows_kernel


def test_partial_view_of_one_sequence_uses_the_default_kernel() -> None:
    """The page tables of a partial view are as long as the context, but nearly empty."""
    shape = geometry.Geometry(
        rows=8, batch=1, kv_heads=8, group=8, width=64, page_size=16, views=8, table=8192,
        words=1, window=0, scale=0.125, has_sinks=True,
    )  # fmt: skip
    forms = [
        first_rule(TABLE, Facts(each, 16, prompt=False, has_lists=False, own=None)).form
        for each in (shape, replace(shape, views=1), replace(shape, rows=64, batch=8))
    ]
    assert forms == ["split", "many", "many"]


@pytest.mark.parametrize(
    ("position", "page_size"), [(4500, 64), *slow((2500, 16), (4500, 16), (2500, 64))]
)
def test_many_rows_share_a_long_context(position: int, page_size: int) -> None:
    """Cover splits with several chunks, rows in two tiles, and trees whose tiles are per row."""
    shape, pages = replace(MANY, page_size=page_size), MANY_PAGES * 64 // page_size
    text, other = Text.drawn(4700, shape, 3), Text.drawn(700, shape, 2)
    reference = Launch(shape, [alone(text, position)], pages=pages).attended()[0][-1]
    for rows in (6, 15, 36):
        chain = Launch(shape, [reverified(text, position, rows)], pages=pages, seed=3)
        assert chain.entries() == ["attend_many", "join_slots"]
        np.testing.assert_array_equal(chain.attended()[0][-1], reference)
    tree = node(text, position, (164, 163, 0, 162))
    wide = wide_node(text, position)
    for branch, row in ((tree, 5), (wide, 4)):
        sequences = [reverified(other, 500, 40), branch, alone(other, 3)]
        launch = Launch(shape, sequences, padding_rows=5, pages=pages, seed=4)
        assert launch.entries() == ["attend_few", "attend_many", "join_slots"]
        np.testing.assert_array_equal(launch.attended()[1][row], reference)


@pytest.mark.parametrize("position", [4096, *slow(1040, 4095, 4500)])
def test_bits_do_not_depend_on_the_splits_of_the_context(position: int) -> None:
    """With 32 splits of 128 keys, some splits have more than one chunk beyond 4096 keys."""
    shape = Geometry(page_size=64, group=2)
    pages = 72
    text = Text.drawn(position + 2, shape, 3)
    sequences = [
        alone(text, position),
        reverified(text, position, 3),
        node(text, position, (0, 1, 2, 3)),
    ]

    def attended(tactic: Tactic, *branches: Branch[Text]) -> list[np.ndarray]:
        padding = len(branches) - 1
        launch = Launch(shape, branches, pages=pages, tactic=tactic, padding_rows=padding)
        return launch.attended()

    reference = [attended({"context_ctas": 1}, sequence)[0] for sequence in sequences]
    dense = expected(shape, text, position)
    for rows, row in zip(reference, (-1, -1, 5), strict=True):
        np.testing.assert_array_equal(rows[row], reference[0][0])
        np.testing.assert_allclose(values(rows[row], torch.bfloat16), dense, atol=1e-2, rtol=2e-2)
    for ctas, stages in ((1, 2), (2, 2), (4, 4), (32, 3)):
        tactic = {"context_ctas": ctas, "stages": stages}
        for sequence, rows in zip(sequences, reference, strict=True):
            np.testing.assert_array_equal(attended(tactic, sequence)[0], rows, err_msg=str(tactic))
        tree, single = attended(tactic, sequences[2], sequences[0])
        np.testing.assert_array_equal(tree, reference[2], err_msg=f"tree in a batch, {tactic}")
        np.testing.assert_array_equal(single, reference[0], err_msg=f"single in a batch, {tactic}")


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (Geometry(page_size=64, window=1200), 3),
        *slow(
            (Geometry(page_size=64), 19),
            (Geometry(group=8, width=64, page_size=64), 5),
            (Geometry(page_size=64), 2),
            (Geometry(group=8, width=64, page_size=64), 4),
        ),
    ],
)
def test_bits_do_not_depend_on_which_ctas_join_the_splits(shape: Geometry, rows: int) -> None:
    """CTAs join splits together on a GPU that holds all of them at once.

    One CTA may process several.
    """
    text, other = Text.drawn(1500, shape, 3), Text.drawn(300, shape, 4)

    def attended(multiprocessors: int, *branches: Branch[Text]) -> list[np.ndarray]:
        launch = Launch(
            shape, branches, pages=72, padding_rows=1, tactic={"split_teams": 0},
            target=Target(multiprocessors=multiprocessors),
        )  # fmt: skip
        assert OP.lower is not None
        [lowered] = OP.lower(launch.request()).launches
        assert dict(lowered.kernel.constants)["MEETS"] == (multiprocessors > 1)
        return launch.attended()

    chain, short = reverified(text, 1450, rows), reverified(other, 130, 1)
    tree = node(text, 1279, (164, 163, 0, 162))
    for branches in ([chain], [chain, short], [reverified(text, 120, rows)], [tree]):
        together, reference = attended(2048, *branches), attended(1, *branches)
        for result, by_one in zip(together, reference, strict=True):
            np.testing.assert_array_equal(result, by_one)


@pytest.mark.parametrize("geometry", [Geometry(), Geometry(group=8, width=64, page_size=64)])
@pytest.mark.parametrize("window", [0, 40])
def test_prefill_does_not_depend_on_chunk_boundaries(geometry: Geometry, window: int) -> None:
    shape = replace(geometry, window=window)
    text, other = Text.drawn(150, shape, 4), Text.drawn(60, shape, 5)

    def chunk(begin: int, end: int) -> Branch[Text]:
        return Branch(text, tuple(range(end)), end, tuple(range(begin, end)))

    whole = Launch(shape, [chunk(0, 150)], phase="prefill").attended()[0]
    for position in (0, 1, 63, 64, 101, 149):
        np.testing.assert_allclose(
            values(whole[position], torch.bfloat16),
            expected(shape, text, position),
            atol=1e-2,
            rtol=2e-2,
        )
    parts = []
    for begin, end in ((0, 17), (17, 64), (64, 65), (65, 150)):
        beside = [Branch(other, tuple(range(21)), 21, tuple(range(2, 21))), chunk(begin, end)]
        launch = Launch(shape, beside, phase="prefill", padding_rows=2, seed=end)
        parts.append(launch.attended()[1])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("window", [0, 40])
def test_decoding_kernels_give_a_prompt_equal_bits_alone_and_in_a_batch(window: int) -> None:
    """Short prompts share launches of up to 256 rows; a prompt alone is padded to fewer rows."""
    shape = Geometry(window=window)
    texts = [Text.drawn(length, shape, length) for length in (63, 116, 75)]
    empty = Branch(texts[0], (), 0, ())

    def whole(text: Text) -> Branch[Text]:
        places = tuple(range(len(text.q)))
        return Branch(text, places, len(places), places)

    together = [*map(whole, texts), *[empty] * 5]
    attended = Launch(shape, together, padding_rows=2).attended()
    for text, reference, padded in zip(texts, attended, (64, 128, 104), strict=False):
        beside, padding = [empty] * 7, padded - len(text.q)
        result = Launch(shape, [whole(text), *beside], padding_rows=padding, seed=1).attended()[0]
        np.testing.assert_array_equal(result, reference)
        last = values(result[-1], torch.bfloat16)
        dense = expected(shape, text, len(text.q) - 1)
        np.testing.assert_allclose(last, dense, atol=1e-2, rtol=2e-2)


def test_rejects_unsupported_requests() -> None:
    shape = Geometry()
    launch = Launch(shape, [alone(Text.drawn(4, shape, 6), 3)])
    tensors = {n: tensor_info(a) for n, a in launch.inputs().items()}
    tensors["attended"] = tensors["q"]
    attributes = {"scale": 0.25, "window": 0}
    assert OP.lower is not None

    def refuses(match: str, **changes: TensorInfo) -> None:
        assert OP.lower is not None
        with pytest.raises(SpecbuildError, match=match):
            OP.lower(LoweringRequest({**tensors, **changes}, attributes))

    refuses("bfloat16", q=TensorInfo((1, 3, 16), "float32"))
    refuses("equal widths", v_pool=TensorInfo((2, 1, 16, 8), "bfloat16"))
    refuses("query heads", q=TensorInfo((1, 17, 16), "bfloat16"))
    pools = {name: TensorInfo((2, 2, 16, 16), "bfloat16") for name in ("k_pool", "v_pool")}
    refuses("3 query heads and 2", q=TensorInfo((1, 3, 16), "bfloat16"), **pools)


def test_many_rows_with_over_32_sequences() -> None:
    text = Text.drawn(90, MANY, 5)
    launch = Launch(MANY, [reverified(text, 12 + 2 * i, 12) for i in range(36)], pages=MANY_PAGES)
    assert "attend_many" in launch.entries()
    for i, rows in enumerate(launch.attended()):
        if i > 30:
            reference = Launch(MANY, [alone(text, 12 + 2 * i)], pages=MANY_PAGES).attended()[0]
            np.testing.assert_array_equal(rows[-1], reference[-1], err_msg=str(i))


def test_prompts_of_over_32_sequences() -> None:
    shape = Geometry()
    text = Text.drawn(60, shape, 5)
    rows = Launch(
        shape, [reverified(text, 4 + i, 3) for i in range(36)], phase="prefill"
    ).attended()
    for i in (31, 32, 35):
        reference = Launch(shape, [reverified(text, 4 + i, 3)], phase="prefill").attended()[0]
        np.testing.assert_array_equal(rows[i], reference)


@pytest.mark.parametrize("start", [63, 95])
def test_the_first_row_with_its_own_copy_may_end_a_warpgroup(start: int) -> None:
    text = Text.drawn(200, MANY, 9)
    path = tuple(range(7))
    tokens = (*range(start + 6), 150, start + 6, *[151] * 4)
    lineages = (
        *(path[: i + 1] for i in range(7)), (*path[:6], 7), *((0, 8 + i) for i in range(4)),
    )  # fmt: skip
    tree = Branch(text, tokens, start, tuple(range(start, start + 12)), lineages)
    launch = Launch(MANY, [tree], pages=MANY_PAGES)
    assert "attend_many" in launch.entries()
    reference = Launch(MANY, [alone(text, start + 6)], pages=MANY_PAGES).attended()[0][-1]
    np.testing.assert_array_equal(launch.attended()[0][7], reference)
