"""Attention over lists of slots in the emulator: the bits of full attention, in any launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.cases import BUSHY, Branch, Launch, chain_of
from specbuild.plugins_cuda.paged_tree_attention.op import OP
from specbuild.runtime.errors import SpecbuildError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

GEOMETRY = Launch(
    [Branch(300, 0, BUSHY), Branch(70, 2)], kv_heads=2, group=3, page_size=16, padding_rows=1
)
_NAMES = {"q": "bfloat16", "k_pool": "bfloat16", "v_pool": "bfloat16", "sinks": "float32"}
Arrays = dict[str, np.ndarray]


def drawn(launch: Launch, seed: int = 0) -> Arrays:
    arrays = launch.arrays(np.random.default_rng(seed))
    named = dict(zip([spec.name for spec in OP.inputs], arrays, strict=True))
    return {
        name: bits(torch.from_numpy(array).bfloat16()) if name in list(_NAMES)[:3] else array
        for name, array in named.items()
        if array is not None
    }


def attended(arrays: Arrays, target_ctas: int = 3) -> np.ndarray:
    """Return the result's bits [T, Hq, D]."""
    shapes = {n: TensorInfo(a.shape, _NAMES.get(n, "int32")) for n, a in arrays.items()}
    width = arrays["q"].shape[2]
    assert OP.lower is not None
    lowering = OP.lower(
        LoweringRequest(
            {**shapes, "attended": shapes["q"]},
            {"scale": width**-0.5, "window": 0},
            target=replace(SMALL_TARGET, multiprocessors=target_ctas),
        )
    )
    return run_lowering(OP, lowering, arrays, {"attended": arrays["q"]})["attended"]


def lists_of_all_slots(launch: Launch, list_width: int) -> np.ndarray:
    """Return lists [T, 1, held] of all slots that each row attends to."""
    lists = np.full((len(launch.rows()) + launch.padding_rows, 1, list_width), -1, np.int32)
    for row, (_, branch, slot, lineage) in enumerate(launch.rows()):
        chain = range(branch.tree_start if lineage else slot + 1)
        seen = [*chain, *(branch.tree_start + node for node in lineage)]
        lists[row, 0, : len(seen)] = seen
    return lists


def test_lists_of_everything_give_the_bits_of_full_attention() -> None:
    arrays, used = drawn(GEOMETRY), len(GEOMETRY.rows())
    full = attended(arrays)
    for multiprocessors in (1, 64):
        listed = attended(
            arrays | {"selected": lists_of_all_slots(GEOMETRY, 320)}, target_ctas=multiprocessors
        )
        np.testing.assert_array_equal(listed[:used], full[:used])


def test_rows_with_full_attention_have_equal_bits_in_a_mixed_batch() -> None:
    """Full and sparse rows share CTAs; the list of one KV head may be full."""
    arrays, used = drawn(GEOMETRY, 1), len(GEOMETRY.rows())
    full, lists = attended(arrays), lists_of_all_slots(GEOMETRY, 320)[:, [0, 0]]
    lists[:, :, 40:] = -1
    sparse = attended(arrays | {"selected": lists})
    whole = [(0, 0), (0, 1), (3, 1), (7, 0), (10, 0), (10, 1)]
    for row, head in whole:
        lists[row, head] = [WHOLE, *[-1] * 319]
    mixed = attended(arrays | {"selected": lists}).reshape(len(lists), 2, 3, -1)
    wanted = sparse.copy().reshape(mixed.shape)
    for row, head in whole:
        wanted[row, head] = full.reshape(mixed.shape)[row, head]
    np.testing.assert_array_equal(mixed[:used], wanted[:used])
    assert (mixed[:used] != full[:used].reshape(mixed[:used].shape)).any()


def test_single_rows_have_one_launch_for_full_and_sparse_attention() -> None:
    """Of four sequences, two attend to everything, one to all listed slots, one to some."""
    launch = Launch(
        [Branch(300, 1), Branch(70, 1), Branch(390, 1), Branch(200, 1)], kv_heads=2, group=3,
        page_size=16, padding_rows=0,
    )  # fmt: skip
    arrays = drawn(launch, 2)
    full, lists = attended(arrays), lists_of_all_slots(launch, 420)
    lists[3, 0, 60:] = -1
    sparse = [attended(arrays | {"selected": lists}, target_ctas) for target_ctas in (1, 64)]
    np.testing.assert_array_equal(*sparse)
    lists[[0, 1], 0] = [WHOLE, *[-1] * 419]
    shapes = {n: TensorInfo(a.shape, _NAMES.get(n, "int32")) for n, a in arrays.items()}
    by_num_launches = {}
    for target_ctas in (1, 64):
        request = LoweringRequest(
            {**shapes, "selected": TensorInfo(lists.shape, "int32"), "attended": shapes["q"]},
            {"scale": 0.25, "window": 0},
            target=replace(SMALL_TARGET, multiprocessors=target_ctas),
        )
        assert OP.lower is not None
        by_num_launches[len(OP.lower(request).launches)] = attended(
            arrays | {"selected": lists}, target_ctas
        )
    assert sorted(by_num_launches) == [1, 2]
    for result in by_num_launches.values():
        np.testing.assert_array_equal(result[:3], full[:3])
        np.testing.assert_array_equal(result[3], sparse[0][3])
    assert (sparse[0][3] != full[3]).any()


@dataclass(frozen=True)
class _Text:
    """Keys and values of the tokens of a sequence, and the query of the last token."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray

    def at(self, slots: Sequence[int], tree_start: int) -> Arrays:
        """Put the last token into a launch as the only row, with token i at slot ``slots[i]``."""
        pages = 12
        table = 1 + np.random.default_rng(sum(slots)).permutation(pages).astype(np.int32)
        pools = []
        for values in (self.k, self.v):
            pool = np.full((pages + 1, values.shape[1], 16, values.shape[2]), np.nan, np.float32)
            for token, slot in enumerate(slots):
                pool[table[slot // 16], :, slot % 16] = values[token]
            pools.append(bits(torch.from_numpy(pool).bfloat16()))
        words = np.zeros((1, 1), np.uint32)
        for slot in slots:
            words[0, 0] |= np.uint32(1 << (slot - tree_start) if slot >= tree_start else 0)
        return {
            "q": bits(torch.from_numpy(self.q[None]).bfloat16()),
            "k_pool": pools[0],
            "v_pool": pools[1],
            "page_table": table[None, None],
            "row_start": np.array([0, 1], np.int32),
            "row_slot": np.array([slots[-1]], np.int32),
            "tree_start": np.array([tree_start], np.int32),
            "ancestor_bits": words.view(np.int32),
        }


def test_a_token_has_equal_bits_alone_and_in_a_tree() -> None:
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((160, 2, 16)).astype(np.float32) for _ in range(2))
    text = _Text(k, v, rng.standard_normal((6, 16)).astype(np.float32))
    chosen = sorted([*rng.choice(150, 130, replace=False), *range(150, 160)])

    def listed(slots: Sequence[int]) -> np.ndarray:
        lists = np.full((1, 1, 150), -1, np.int32)
        lists[0, 0, : len(chosen)] = [slots[token] for token in chosen]
        return lists

    straight = list(range(160))
    tree = [*range(155), 156, 159, 160, 170, 181]
    alone = attended(text.at(straight, 160) | {"selected": listed(straight)})
    for target in (1, 40):
        branched = text.at(tree, 155) | {"selected": listed(tree)}
        np.testing.assert_array_equal(attended(branched, target), alone)


def test_rejects_unsupported_lists() -> None:
    launch = replace(GEOMETRY, selected=5)
    shapes = {n: TensorInfo(a.shape, _NAMES.get(n, "int32")) for n, a in drawn(launch).items()}
    tensors = {**shapes, "attended": shapes["q"]}
    assert OP.lower is not None
    with pytest.raises(SpecbuildError, match="window of 8"):
        OP.lower(LoweringRequest(tensors, {"scale": 0.25, "window": 8}))
    with pytest.raises(SpecbuildError, match="chunks of a prompt"):
        OP.lower(LoweringRequest(tensors, {"scale": 0.25, "window": 0}, "prefill"))


def test_lists_of_over_32_chunks() -> None:
    launch = Launch(
        [Branch(8199, 1), Branch(4199, 1)], kv_heads=1, group=2, page_size=64, padding_rows=0
    )
    arrays = drawn(launch)
    listed = attended(arrays | {"selected": lists_of_all_slots(launch, 8300)})
    np.testing.assert_array_equal(listed, attended(arrays))


def test_lists_in_a_tree_of_two_words() -> None:
    branches = [Branch(40, 0, chain_of(35)), Branch(9, 0, BUSHY)]
    launch = Launch(branches, kv_heads=2, group=3, page_size=16)
    arrays, used = drawn(launch), len(launch.rows())
    listed = attended(arrays | {"selected": lists_of_all_slots(launch, 90)})
    np.testing.assert_array_equal(listed[:used], attended(arrays)[:used])


def test_one_kv_head_of_a_cta_has_full_attention() -> None:
    arrays, used = drawn(GEOMETRY, 1), len(GEOMETRY.rows())
    full, lists = attended(arrays), lists_of_all_slots(GEOMETRY, 320)[:, [0, 0]]
    lists[3, 1] = [WHOLE, *[-1] * 319]
    listed = attended(arrays | {"selected": lists})
    np.testing.assert_array_equal(listed[:used], full[:used])
