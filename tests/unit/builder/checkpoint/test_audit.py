"""The audit lists all findings at once, with readable names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit, group_names
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError


def stored_tensor(name: str, dtype: str, *shape: int) -> SourceTensor:
    return SourceTensor(name, dtype, shape, (name,), lambda: torch.empty(shape), None, None)


def test_one_error_lists_all_findings() -> None:
    expected = {
        "a": ExpectedTensor((2, 3), ("BF16",)),
        "b": ExpectedTensor((4,), ("F32", "BF16")),
        "c": ExpectedTensor((5,), ("U8",)),
        "d": ExpectedTensor((6,), ("U8",)),
    }
    tensors = [
        stored_tensor("b", "F32", 3),
        stored_tensor("c", "I8", 5),
        stored_tensor("d", "U8", 6),
        stored_tensor("e", "F16", 1),
    ]
    with pytest.raises(SpecbuildError) as caught:
        audit("dir", expected, {t.name: t for t in tensors}, ["look there"])
    assert str(caught.value).splitlines() == [
        "dir: 4 tensors do not fit the model:",
        "  missing: a, shape [2, 3]",
        "  wrong shape: b: got [3], expected [4]",
        "  wrong dtype: c: got I8, expected U8",
        "  left over: e, shape [1] F16",
        "  hint: look there",
    ]


def test_no_findings_raise_no_error() -> None:
    audit(
        "dir",
        {"a": ExpectedTensor((2,), ("F16",))},
        {"a": stored_tensor("a", "F16", 2)},
        ["unused"],
    )


def test_long_lists_are_truncated() -> None:
    tensors = {f"t{i}": stored_tensor(f"t{i}", "F32", i) for i in range(99)}
    with pytest.raises(SpecbuildError) as caught:
        audit("dir", {}, tensors)
    assert "99 tensors" in str(caught.value)
    assert str(caught.value).splitlines()[-1] == "  … and 75 more lines like these"


def test_names_with_consecutive_numbers_form_groups() -> None:
    names = [f"l.{i}.q.w" for i in (7, 0, 1, 2, 9)] + ["l.3.k.w", "norm.w"]
    assert group_names(names) == ["l.{0-2,7,9}.q.w", "l.3.k.w", "norm.w"]


@given(st.sets(st.integers(0, 60), min_size=1))
def test_a_group_expands_to_exactly_its_names(numbers: set[int]) -> None:
    (group,) = group_names(f"x.{n}.y" for n in numbers)
    inner = group.removeprefix("x.").removesuffix(".y").strip("{}")
    listed: list[int] = []
    for run in inner.split(","):
        low, _, high = run.partition("-")
        listed.extend(range(int(low), int(high or low) + 1))
    assert listed == sorted(numbers)
