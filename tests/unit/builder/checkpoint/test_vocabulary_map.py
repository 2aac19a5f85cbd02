"""``d2t`` as offsets and as a map."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.families.eagle3.vocabulary_map import read_offsets
from specbuild.runtime.errors import SpecbuildError

VOCAB = 50
TARGETS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB, unique=True)


def members(targets: list[int]) -> torch.Tensor:
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[targets] = True
    return t2d


@given(targets=TARGETS, with_t2d=st.booleans())
def test_offsets_are_recognized(targets: list[int], with_t2d: bool) -> None:
    d2t = torch.tensor([target - draft for draft, target in enumerate(targets)])
    is_map = len(set(d2t.tolist())) == len(d2t) and int(d2t.min()) >= 0 and int(d2t.max()) < VOCAB
    if not with_t2d and is_map and d2t.tolist() != targets:
        with pytest.raises(SpecbuildError, match=r"d2t can be offsets or target ids, .* add t2d"):
            read_offsets("d", d2t, None, VOCAB)
        return
    form, offsets = read_offsets("d", d2t, members(targets) if with_t2d else None, VOCAB)
    assert form == "offsets"
    assert [j + int(o) for j, o in enumerate(offsets)] == targets


@given(targets=TARGETS)
def test_a_map_is_recognized_by_t2d(targets: list[int]) -> None:
    d2t = torch.tensor(targets, dtype=torch.int32)
    shifted = [j + t for j, t in enumerate(targets)]
    form, offsets = read_offsets("d", d2t, members(targets), VOCAB)
    assert form == ("offsets" if sorted(shifted) == sorted(targets) else "map")
    if form == "map":
        assert offsets.dtype == torch.int64
        assert [j + int(o) for j, o in enumerate(offsets)] == targets


def test_a_map_is_recognized_by_the_size_of_the_vocabulary() -> None:
    form, offsets = read_offsets("d", torch.tensor([3, 10, 48, 49]), None, VOCAB)
    assert (form, offsets.tolist()) == ("map", [3, 9, 46, 46])


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([0, 49, 0], None, "maps draft token 1 to target token 50, outside .* vocabulary of 50"),
        ([-1, -1], None, "maps draft token 0 to target token -1"),
        ([5, 4, 4], None, "maps several draft tokens to target token 5"),
        ([0, 0], [0, 2], "d2t and t2d disagree: d2t has 2 target tokens and t2d 2"),
        ([0, 0], [0], "d2t has 2 target tokens and t2d 1"),
    ],
)
def test_rejects_invalid_values(d2t: list[int], t2d: list[int] | None, message: str) -> None:
    with pytest.raises(SpecbuildError, match=f"draft: d2t.*{message.removeprefix('d2t')}"):
        read_offsets("draft", torch.tensor(d2t), None if t2d is None else members(t2d), VOCAB)
