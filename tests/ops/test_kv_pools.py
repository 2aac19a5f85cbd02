"""KvWrite and KvCommit against loops over single entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from forms import portable
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.plugins_cuda.opspec import OpSpec
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
def test_write_puts_every_row_into_its_slot(run: Run, data: st.DataObject) -> None:
    page_size, heads = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.integers(1, 3))
    slots = data.draw(st.lists(st.integers(page_size, 6 * page_size - 1), unique=True, min_size=1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pool = rng.standard_normal((6, heads, page_size, 5)).astype(np.float32)
    new = rng.standard_normal((len(slots), heads, 5)).astype(np.float32)
    wanted = pool.copy()
    for row, slot in zip(new, slots, strict=True):
        wanted[entry(slot, page_size)] = row
    got = run(WRITE, [pool, new, np.array(slots, np.int32)])
    np.testing.assert_array_equal(got, wanted)


@each_form
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_commit_reads_everything_before_it_writes(run: Run, data: st.DataObject) -> None:
    """Targets may be other pairs' sources: shifts, swaps and cycles included."""
    page_size = data.draw(st.sampled_from([1, 3, 8]))
    slots = st.integers(page_size, 6 * page_size - 1)
    targets = data.draw(st.lists(slots, unique=True, min_size=1, max_size=9))
    sources = [data.draw(st.one_of(st.sampled_from(targets), slots)) for _ in targets]
    dropped = data.draw(st.lists(st.booleans(), min_size=len(targets), max_size=len(targets)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pool = rng.standard_normal((6, 2, page_size, 5)).astype(np.float32)
    wanted = pool.copy()
    for source, target, absent in zip(sources, targets, dropped, strict=True):
        if not absent:
            wanted[entry(target, page_size)] = pool[entry(source, page_size)]
    where = np.array([dropped])
    got = run(
        COMMIT,
        [
            pool,
            np.where(where, -1, np.array([sources])).astype(np.int32),
            np.where(where, -1, np.array([targets])).astype(np.int32),
        ],
    )
    np.testing.assert_array_equal(got[1:], wanted[1:])
