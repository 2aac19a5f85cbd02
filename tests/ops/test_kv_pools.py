"""KvWrite and KvCommit against loops over single entries; pools of e4m3 values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from forms import forms_of, portable
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import examples
from mx_rounding import E4M3

from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.paged_tree_attention.cases import CASES
from specbuild.plugins_cuda.registry import op_named

WRITE, COMMIT = op_named("KvWrite"), op_named("KvCommit")
Run = Callable[[OpSpec, Sequence[np.ndarray]], np.ndarray]


def by_reference(op: OpSpec, arrays: Sequence[np.ndarray]) -> np.ndarray:
    result: np.ndarray = op.reference(*map(torch.from_numpy, arrays)).numpy()
    return result


def by_body(op: OpSpec, arrays: Sequence[np.ndarray]) -> np.ndarray:
    return portable(op, arrays, {})[0]


each_form = pytest.mark.parametrize("run", [by_reference, by_body])


def entry(slot: int, page_size: int) -> tuple[int, slice, int]:
    return slot // page_size, slice(None), slot % page_size


@each_form
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_write_stores_every_row_in_its_slot(run: Run, data: st.DataObject) -> None:
    page_size, heads = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.integers(1, 3))
    slots = data.draw(st.lists(st.integers(page_size, 6 * page_size - 1), unique=True, min_size=1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pool = rng.standard_normal((6, heads, page_size, 5)).astype(np.float32)
    new = rng.standard_normal((len(slots), heads, 5)).astype(np.float32)
    expected = pool.copy()
    for row, slot in zip(new, slots, strict=True):
        expected[entry(slot, page_size)] = row
    result = run(WRITE, [pool, new, np.array(slots, np.int32)])
    np.testing.assert_array_equal(result, expected)


@each_form
@examples(25)
@given(data=st.data())
def test_commit_reads_all_sources_before_it_writes(run: Run, data: st.DataObject) -> None:
    """Targets may be sources of other pairs, as in shifts, swaps and cycles."""
    page_size = data.draw(st.sampled_from([1, 3, 8]))
    slots = st.integers(page_size, 6 * page_size - 1)
    targets = data.draw(st.lists(slots, unique=True, min_size=1, max_size=9))
    sources = [data.draw(st.one_of(st.sampled_from(targets), slots)) for _ in targets]
    dropped = data.draw(st.lists(st.booleans(), min_size=len(targets), max_size=len(targets)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pool = rng.standard_normal((6, 2, page_size, 5)).astype(np.float32)
    expected = pool.copy()
    for source, target, absent in zip(sources, targets, dropped, strict=True):
        if not absent:
            expected[entry(target, page_size)] = pool[entry(source, page_size)]
    where = np.array([dropped])
    result = run(
        COMMIT,
        [
            pool,
            np.where(where, -1, np.array([sources])).astype(np.int32),
            np.where(where, -1, np.array([targets])).astype(np.int32),
        ],
    )
    np.testing.assert_array_equal(result[1:], expected[1:])


def hard_values() -> np.ndarray:
    """Return e4m3 values, midpoints, their neighbours, and values out of range, of both signs."""
    grid = np.array(E4M3, np.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    exact = np.concatenate([grid, middles, 2.0 ** np.arange(-12, 12, dtype=np.float32)])
    around = [np.nextafter(exact, np.float32(toward)) for toward in (0, np.inf)]
    drawn = np.random.default_rng(3).standard_normal(4000).astype(np.float32)
    beyond = np.array([448, 463, 464, 465, 1e5, 3e38, 1e-30, 0], np.float32)
    scaled = drawn * np.float32(2.0) ** np.arange(4000, dtype=np.float32).__mod__(24).__sub__(14)
    values = np.concatenate([exact, *around, drawn, scaled, beyond])
    return np.concatenate([values, -values]).astype(np.float32)


def nearest_code(value: float) -> int:
    """Compare with every number of the format; ties go to even codes."""
    distances = [abs(min(abs(float(value)), E4M3[-1]) - number) for number in E4M3]
    least = min(distances)
    code = min((i for i, d in enumerate(distances) if d == least), key=lambda i: i % 2)
    return code + 128 * (value < 0 and code > 0)


@each_form
def test_e4m3_pools_store_the_nearest_value(run: Run) -> None:
    values = hard_values()
    values = np.pad(values, (0, -len(values) % 16)).reshape(-1, 2, 8)
    pool = np.full((len(values) + 1, 2, 1, 8), 255, np.uint8)
    slots = np.arange(1, len(values) + 1, dtype=np.int32)
    result = run(WRITE, [pool, values, slots])[1:, :, 0]
    expected = np.vectorize(nearest_code, otypes=[np.uint8])(values)
    np.testing.assert_array_equal(result, expected)


@each_form
def test_commit_copies_e4m3_values_unchanged(run: Run) -> None:
    pool = np.arange(256, dtype=np.uint8).reshape(4, 2, 2, 16)
    expected = pool.copy()
    expected[entry(3, 2)], expected[entry(4, 2)] = pool[entry(6, 2)], pool[entry(3, 2)]
    result = run(COMMIT, [pool, np.array([[6, 3]], np.int32), np.array([[3, 4]], np.int32)])
    np.testing.assert_array_equal(result[1:], expected[1:])


@pytest.mark.parametrize("case", [0, -1], ids=["first", "last"])
def test_attention_over_e4m3_equals_attention_over_its_values(case: int) -> None:
    """In every form, the result equals that over a bf16 pool of the same values, bit for bit."""
    attend = op_named("PagedTreeAttention")
    drawn_case = CASES[case]
    rng = np.random.default_rng(4)
    arrays = list(drawn_case.make(rng))
    signed = np.array([*E4M3, 0.0, *(-x for x in E4M3), 0.0], np.float32)
    shapes = [pool.shape for pool in arrays[1:3]]
    codes = [rng.integers(0, 127, s) + 128 * rng.integers(0, 2, s) for s in shapes]
    of_codes, of_values = list(arrays), list(arrays)
    of_codes[1:3] = [c.astype(np.uint8) for c in codes]
    of_values[1:3] = [signed[c] for c in codes]
    for name, form in forms_of(attend, arrays, drawn_case.attributes).items():
        if name.startswith("TensorRT"):
            continue
        result, expected = (
            form(attend, a, drawn_case.attributes)[0] for a in (of_codes, of_values)
        )
        np.testing.assert_array_equal(result, expected, err_msg=name)
    attributes = attend.complete(drawn_case.attributes)
    result, expected = (
        attend.reference(*(None if a is None else torch.from_numpy(a) for a in some), **attributes)
        for some in (of_codes, of_values)
    )
    assert torch.equal(result, expected)
