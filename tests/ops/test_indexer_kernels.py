"""Kernels of the indexer in the emulator: scores that are hard to select from, and fp8 keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    bits,
    cases_for,
    kernel_case,
    values,
)
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.dsa_check.cases import Break, lists
from specbuild.plugins_cuda.dsa_indexer.cases import indexer_launch
from specbuild.plugins_cuda.dsa_indexer.key_types import as_cached
from specbuild.plugins_cuda.launches import LoweringRequest, Phase, Target, TensorInfo
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.paged_tree_attention.cases import BUSHY, Branch
from specbuild.plugins_cuda.path_commit.cases import KERNEL_CASES as COMMIT_CASES
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_indexer.cases import Sizes, index
from specbuild.runtime.errors import SpecbuildError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")

INDEXER, PROJECTIONS = op_named("DsaIndexer"), op_named("RmsIndexer")
COMMIT, CHECK = op_named("PathCommit"), op_named("DsaCheck")
WIDTH, PAGE, TREE = 16, 16, 3
KEPT = {"threshold": 0, "first_tokens": 3, "recent_tokens": 5}
_BF16 = ("q", "head_weights", "key_pool")
Arrays = dict[str, np.ndarray]


def arrays_of(
    coarse: np.ndarray, fine: np.ndarray, budget: int, scale: float = 1.0, weight: float = 1.0
) -> Arrays:
    """Return two sequences with a chain of three rows each, and exact scores.

    Slot s scores ``weight * ReLU(coarse[s] + fine[s] / 256) * scale``; ``scale`` is a power of two.
    """
    context = len(coarse)
    pages = -(-(context + TREE + 32) // PAGE)
    rng = np.random.default_rng(context)
    table = 1 + rng.permutation(2 * pages).astype(np.int32).reshape(2, 1, pages)
    pool = np.full((2 * pages + 1, 1, PAGE, WIDTH), np.nan, np.float32)
    for b in range(2):
        for slot in range(context + TREE):
            key = np.zeros(WIDTH, np.float32)
            if slot < context:
                key[3], key[9] = coarse[slot], fine[slot]
            pool[table[b, 0, slot // PAGE], 0, slot % PAGE] = key
    q = np.zeros((2 * TREE + 1, 1, WIDTH), np.float32)
    # The rows of the second sequence use 2^score, in the same order.
    q[:, 0, 3], q[:, 0, 9] = scale, scale / 256
    q[TREE:] *= 4.0
    own = np.tile(context + np.arange(TREE, dtype=np.int32), 2)
    chain = (1 << np.arange(1, TREE + 1)) - 1
    return {
        "q": q,
        "head_weights": np.full((len(q), 1), weight, np.float32),
        "key_pool": pool,
        "page_table": table,
        "row_start": np.array([0, TREE, 2 * TREE], np.int32),
        "row_slot": np.append(own, 0).astype(np.int32),
        "tree_start": np.full(2, context, np.int32),
        "ancestor_bits": np.append(np.tile(chain, 2), 0).astype(np.int32)[:, None],
        "positions": np.append(own, 0).astype(np.int32),
        "budget": np.array([budget, budget // 2], np.int32),
    }


def by_reference(arrays: Arrays) -> np.ndarray:
    named = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given = [named.get(spec.name) for spec in INDEXER.inputs]
    top_k = int(arrays["budget"].max())
    lists: np.ndarray = INDEXER.reference(*given, top_k=top_k, **KEPT).numpy()
    return lists


def by_kernels(arrays: Arrays, shape: tuple[int, ...], ctas: int = 3) -> np.ndarray:
    given = {n: bits(torch.from_numpy(a).bfloat16()) if n in _BF16 else a
             for n, a in arrays.items()}  # fmt: skip
    infos = {
        n: TensorInfo(a.shape, "bfloat16" if n in _BF16 else "int32") for n, a in given.items()
    }
    request = LoweringRequest(
        {**infos, "selected": TensorInfo(shape, "int32")},
        {"top_k": int(arrays["budget"].max()), **KEPT},
        target=replace(SMALL_TARGET, multiprocessors=ctas),
    )
    assert INDEXER.lower is not None
    lowering = INDEXER.lower(request)
    selected = np.full(shape, -99, np.int32)
    result: np.ndarray = run_lowering(INDEXER, lowering, given, {"selected": selected})["selected"]
    return result


def uniform(low: float, high: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, count: rng.uniform(low, high, count)


def mostly_zero(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < 0.05, rng.uniform(0, 9, count), -1.0)


def alike(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < 0.5, 70.0, 71.0)


SCORES = {
    "of all sizes": uniform(-3, 50),
    "of few digits": uniform(64, 74),
    "of one digit": uniform(64, 64.9),
    "mostly zero": mostly_zero,
    "two values": alike,
    "all zero": uniform(-3, -1),
}


@pytest.mark.parametrize(("context", "budget"), [(1030, 130), (4200, 900)])
@pytest.mark.parametrize("name", SCORES)
def test_selects_the_best_scores(name: str, context: int, budget: int) -> None:
    """Use one CTA a row and several; more slots share the last digit than the list can hold."""
    rng = np.random.default_rng(len(name))
    coarse = torch.from_numpy(SCORES[name](rng, context).astype(np.float32)).bfloat16()
    fine = rng.integers(0, 64, context) if name != "two values" else np.zeros(context)
    if name == "mostly zero":
        fine = np.where(coarse.float().numpy() < 0, 0, fine)
    arrays = arrays_of(coarse.float().numpy(), fine.astype(np.float32), budget)
    expected = by_reference(arrays)
    result = by_kernels(arrays, expected.shape)
    np.testing.assert_array_equal(result[: 2 * TREE], expected[: 2 * TREE])


# The digits of scores are finest from 2^−8 to 2^8.
@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("scale", [2.0**-13, 2.0**-7, 2.0**2, 2.0**20])
def test_scores_of_any_magnitude_and_sign_are_ordered(scale: float, weight: float) -> None:
    rng = np.random.default_rng(9)
    coarse = torch.from_numpy(rng.uniform(1, 60, 2100).astype(np.float32)).bfloat16().float()
    fine = rng.integers(0, 64, 2100).astype(np.float32)
    arrays = arrays_of(coarse.numpy(), fine, 800, scale, weight)
    expected = by_reference(arrays)
    result = by_kernels(arrays, expected.shape)
    np.testing.assert_array_equal(result[: 2 * TREE], expected[: 2 * TREE])


@examples(12)
@given(
    st.integers(0, 2**32 - 1), st.integers(-40, 40), st.integers(1, 299),
    st.integers(0, 12), st.booleans(),
)  # fmt: skip
def test_selection_with_any_scores_and_budget(
    seed: int, scale: int, budget: int, spread: int, negative: bool
) -> None:
    """Spread the scores over up to 12 binades, with ties and zeros."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-spread, 0, 300)) * rng.choice([-1.0, 1.0, 1.0, 1.0], 300)
    coarse = torch.from_numpy(size.astype(np.float32)).bfloat16().float().numpy()
    arrays = arrays_of(coarse, np.zeros(300), budget, 2.0**scale, -1.0 if negative else 1.0)
    expected = by_reference(arrays)
    result = by_kernels(arrays, (*expected.shape[:2], 300 + TREE + 64))
    np.testing.assert_array_equal(result[: 2 * TREE, :, : expected.shape[2]], expected[: 2 * TREE])
    assert (result[: 2 * TREE, :, expected.shape[2] :] == -1).all()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [5, 40])
def test_fp8_keys_equal_the_rounded_bf16_keys(rows: int, phase: Phase) -> None:
    """Use small keys, keys of every magnitude, and keys beyond the range of fp8."""
    drawn = kernel_case(PROJECTIONS, index(rows, 96, Sizes(2, 32)))
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    # Four tiles are of queries and two of keys: one of small keys, one of large keys.
    weight = drawn.inputs["weight"].float()
    weight[4] *= 2.0**-9
    weight[5] *= 2.0**8
    inputs["weight"] = bits(weight.bfloat16())
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    request = drawn.request(phase, SMALL_TARGET)
    wide = run_lowering(PROJECTIONS, PROJECTIONS.lower(request), inputs, outputs)
    pool = np.random.default_rng(1).integers(0, 127, inputs["key_pool"].shape, np.uint8)
    info = TensorInfo(pool.shape, "uint8")
    request = replace(request, tensors={**request.tensors, "key_pool": info, "key_pool_out": info})
    result = run_lowering(
        PROJECTIONS,
        PROJECTIONS.lower(request),
        {**inputs, "key_pool": pool},
        {**outputs, "key_pool_out": pool},
    )
    np.testing.assert_array_equal(result["q"], wide["q"])
    slots = inputs["write_slot"]
    keys = torch.from_numpy(values(wide["key_pool_out"], torch.bfloat16))
    keys = keys.flatten(0, 2)[slots]
    assert float(keys.abs().max()) > 448 and 0 < float(keys.abs().min()) < 2**-7
    rounded = as_cached(keys, torch.from_numpy(pool)).numpy()
    written = result["key_pool_out"].reshape(-1, pool.shape[3])
    np.testing.assert_array_equal(written[slots], rounded)
    others = np.setdiff1d(np.arange(len(written)), slots)
    np.testing.assert_array_equal(written[others], pool.reshape(written.shape)[others])


FP8_LAUNCHES = {
    "64 wide": indexer_launch(
        [Branch(200, 2), Branch(90, 0, BUSHY)], 60, 30, heads=3, width=64, page_size=16,
        top_k=60, fp8=True,
    ),
    "48 wide": indexer_launch(
        [Branch(150, 2)], 40, heads=2, width=48, page_size=16, top_k=40, fp8=True
    ),
}  # fmt: skip
FP8_PATHS = "gpu: bytes of fp8"


@pytest.mark.parametrize("name", FP8_LAUNCHES)
def test_scores_of_fp8_keys_equal_the_reference(name: str) -> None:
    checked(INDEXER, FP8_LAUNCHES[name].case(name))


LONG_LISTS = indexer_launch([Branch(900, 2), Branch(800, 2)], 700, 650, padding_rows=0, top_k=700)


def _repeat(at: int) -> Break:
    def spoil(selected: np.ndarray) -> None:
        selected[1, 0, at] = selected[1, 0, at - 1]

    return spoil


@pytest.mark.parametrize("spoil", [None, _repeat(319), _repeat(320), _repeat(321)])
def test_the_check_compares_each_entry_with_all_earlier_ones(spoil: Break | None) -> None:
    """The sequences have equal numbers of rows, so their lists are adjacent in memory."""
    checked(CHECK, lists("several pieces", LONG_LISTS, spoil))


def test_fp8_keys_of_a_path_are_committed() -> None:
    checked(COMMIT, next(case for case in COMMIT_CASES if case.name == FP8_PATHS))


def checked(op: OpSpec, case: Case) -> None:
    """Assert that the kernels give the reference's outputs."""
    drawn = kernel_case(op, case)
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    drawn.check(run_lowering(op, drawn.lowering("decode", SMALL_TARGET), inputs, outputs))


@pytest.mark.parametrize(
    ("op", "change", "is_supported"),
    [
        ("DsaIndexer", {"heads": 64, "width": 256}, True),
        ("DsaIndexer", {"heads": 65}, False),
        ("DsaIndexer", {"width": 264}, False),
        ("DsaIndexer", {"width": 12}, False),
        ("DsaIndexer", {"dtype": "float32"}, False),
        ("KvBlockSelect", {"group": 16, "width": 128}, True),
        ("KvBlockSelect", {"group": 17}, False),
        ("KvBlockSelect", {"width": 144}, False),
        ("KvBlockSelect", {"width": 72}, False),
        ("KvBlockSelect", {"dtype": "float32"}, False),
    ],
)
def test_rejects_queries_that_the_kernels_do_not_support(
    op: str, change: dict[str, Any], is_supported: bool
) -> None:
    result = op_named(op)
    request = kernel_case(result, cases_for(result, "decode", gpu=False)[0]).request(
        "decode", Target()
    )
    rows, heads, width = request.tensors["q"].shape
    if "group" in change:
        heads = change["group"] * request.tensors["summary_pool"].shape[1]
    shape = (rows, change.get("heads", heads), change.get("width", width))
    q = TensorInfo(shape, change.get("dtype", "bfloat16"))
    request = replace(request, tensors={**request.tensors, "q": q})
    assert result.lower is not None
    if is_supported:
        assert result.lower(request).launches
        return
    with pytest.raises(SpecbuildError, match=f"{op}: .* build for the cpu backend"):
        result.lower(request)
