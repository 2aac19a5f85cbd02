"""Arrays in the shapes and types of a profile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.engine_dir.manifest import Port, Role, ShapeProfile, SizeRange
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.feeds import (
    chosen_profile,
    from_device,
    padded,
    sizes_of,
    to_device,
)


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=20))
def test_bf16_round_trips(values: list[float]) -> None:
    port = Port("hidden", "bfloat16", ("T",))
    array = np.array(values, np.float32)
    bits = to_device(array, port)
    assert bits.dtype == np.uint16
    once = from_device(bits, port)
    np.testing.assert_array_equal(to_device(once, port)[~np.isnan(once)], bits[~np.isnan(once)])
    assert (np.isnan(once) == np.isnan(array)).all()
    finite = np.isfinite(array) & np.isfinite(once) & (np.abs(array) > 1e-37)
    wanted = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(once[finite], wanted[finite])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True),
    rows=st.integers(1, 45),
    value=st.integers(0, 3),
)
def test_selects_the_first_profile_that_includes_the_sizes(
    sizes: list[int], rows: int, value: int
) -> None:
    ports = (Port("token_ids", "int32", ("T",)), Port("top_k", "int32", ()))
    profiles = tuple(
        ShapeProfile(f"{n} {k}", {"T": SizeRange(n, n, n), "top_k": SizeRange(k, k, k)})
        for n in sorted(sizes)
        for k in (1, 2)
    )
    role = Role("r", ports, (), (), {}, profiles)
    feeds = {"token_ids": np.arange(rows, dtype=np.int32), "top_k": np.array(value, np.int32)}
    found = sizes_of(ports, feeds)
    assert found == {"T": rows, "top_k": value}
    fits = [n for n in sorted(sizes) if n >= rows]
    if not fits or value not in (1, 2):
        with pytest.raises(SpecbuildError, match="has no profile for T"):
            chosen_profile("r", role, found)
        return
    assert profiles[chosen_profile("r", role, found)].name == f"{fits[0]} {value}"


def test_padding_is_absent() -> None:
    starts = padded(np.array([0, 2, 5], np.int32), Port("row_start", "int32", (5,)), (5,))
    assert starts.tolist() == [0, 2, 5, 5, 5]
    scores = padded(np.ones((1, 2), np.float32), Port("scores", "float32", ("B", "M")), (2, 3))
    assert scores.tolist() == [[1, 1, -np.inf], [-np.inf] * 3]
    slots = padded(np.array([[7]], np.int32), Port("full.from_slot", "int32", (1, 2)), (1, 2))
    assert slots.tolist() == [[7, -1]]
    with pytest.raises(SpecbuildError, match="holds"):
        padded(np.zeros(3, np.int32), Port("token_ids", "int32", (2,)), (2,))
