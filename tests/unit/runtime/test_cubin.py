"""The reader of cubins: kernels of NVIDIA's compiler, and damaged files."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_cubin import BANK, BANK_BYTES, kernel_notes, note, parameter, toy_cubin

from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.executors.cuda.cubin import kernel_parameters

SIZES = st.lists(st.sampled_from([4, 8]), max_size=40)
KERNELS = {"one": (8, 4, 8, 4, 4), "none": (), "two": (4,) * 7}


@given(SIZES)
@settings(max_examples=30, deadline=None)
def test_the_toys_writer_is_read_back(sizes: list[int]) -> None:
    data = toy_cubin({"kernel": sizes, "other": (8,)})
    assert kernel_parameters(data, "x") == {"kernel": tuple(sizes), "other": (8,)}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_rejects_damaged_cubins(data: st.DataObject) -> None:
    """Truncated or changed cubins give parameters of 4 or 8 bytes, or one sentence."""
    cubin = bytearray(toy_cubin(KERNELS))
    for _ in range(data.draw(st.integers(1, 3))):
        cubin[data.draw(st.integers(0, len(cubin) - 1))] = data.draw(st.integers(0, 255))
    del cubin[data.draw(st.integers(0, 2 * len(cubin))) :]
    try:
        found = kernel_parameters(bytes(cubin), "x.cubin")
    except EngineFileError as error:
        assert str(error).startswith("x.cubin is no cubin") and "\n" not in str(error)
        return
    assert all(size in (4, 8) for sizes in found.values() for size in sizes)


PLAIN = kernel_notes((8, 4))
BANK_12 = note(BANK, struct.pack("<IHH", 1, 528, 12))


@pytest.mark.parametrize(
    "notes",
    [
        PLAIN[:-1],
        PLAIN + b"\x09\x00\x00\x00",  # a format that nobody knows
        PLAIN + parameter(1, 8, 4),  # twice
        PLAIN + parameter(3, 12, 4),  # none of ordinal 2
        PLAIN + note(BANK, struct.pack("<IHH", 1, 528, 16)),  # two banks
        parameter(0, 0, 16) + note(BANK, struct.pack("<IHH", 1, 528, 16)),  # a struct
        parameter(0, 0, 8) + BANK_12,  # a bank that is not filled
        parameter(0, 4, 8) + BANK_12,  # not where a compiler lays it
        parameter(0, 0, 8) + parameter(1, 8, 4),  # no bank
        note(BANK, b"\0"),
        struct.pack("<BBH", 3, BANK_BYTES, 4),
    ],
)
def test_rejects_unknown_notes(notes: bytes) -> None:
    assert kernel_parameters(toy_cubin({"k": PLAIN}), "x") == {"k": (8, 4)}
    with pytest.raises(EngineFileError, match=r"x is no cubin as it is expected"):
        kernel_parameters(toy_cubin({"k": notes}), "x")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF" + bytes(60), bytes(4096)])
def test_rejects_other_files(data: bytes) -> None:
    with pytest.raises(EngineFileError, match="no cubin"):
        kernel_parameters(data, "x")
