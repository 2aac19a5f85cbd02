"""GGUF headers: valid ones are read, and others are rejected quickly and with little memory."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_raw import ARRAY, BOOL, F32, TEXT, U8, U32, U64, Info, Key, RawFile, array, number, text

from specbuild.builder.checkpoint.gguf import container
from specbuild.builder.checkpoint.gguf.container import is_gguf, read_gguf
from specbuild.builder.checkpoint.gguf.keys import NumberArray, TextArray
from specbuild.builder.checkpoint.gguf.parts import open_model
from specbuild.runtime.errors import SpecbuildError

GOOD = RawFile()
DTYPE = gguf.GGMLQuantizationType


def refusal(path: Path, data: bytes) -> str:
    """Return the error of reading the data: one line, within limits of time and memory."""
    path.write_bytes(data)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(SpecbuildError) as caught:
            open_model(path)
        seconds, memory = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1
    assert memory < 4 * len(data) + (1 << 20)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize("version", [2, 3])
def test_keys_of_every_type_and_tensors(tmp_path: Path, version: int) -> None:
    numbers = (
        ("u8", 0, b"\xff"), ("i8", 1, b"\xff"), ("u16", 2, b"\xff\xff"), ("i16", 3, b"\xff\xff"),
        ("u32", 4, b"\xff" * 4), ("i32", 5, b"\xff" * 4), ("f32", 6, struct.pack("<f", 0.5)),
        ("bool", 7, b"\1"), ("u64", 10, b"\xff" * 8), ("i64", 11, b"\xff" * 8),
        ("f64", 12, struct.pack("<d", 0.1)),
    )  # fmt: skip
    keys = tuple(Key(*entry) for entry in numbers)
    keys += (
        Key("text", TEXT, text("ä")),
        Key("texts", ARRAY, array(TEXT, [text("a"), text(""), text("▁b")])),
        Key("numbers", ARRAY, array(U32, [number(U32, n) for n in (3, 1, 2)])),
        Key("none", ARRAY, array(U64, [])),
    )
    path = tmp_path / "model.gguf"
    path.write_bytes(replace(GOOD, keys=keys, version=version).packed())
    result = read_gguf(path)
    plain = {name: value for name, value in result.keys.items() if not hasattr(value, "values")}
    assert plain == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 0.5,
        "bool": True, "u64": 2**64 - 1, "i64": -1, "f64": 0.1, "text": "ä",
    }  # fmt: skip
    texts, listed, none = (result.keys[name] for name in ("texts", "numbers", "none"))
    assert isinstance(texts, TextArray)
    assert texts.values() == ["a", "", "▁b"]
    assert isinstance(listed, NumberArray)
    assert listed.values().tolist() == [3, 1, 2]
    assert isinstance(none, NumberArray)
    assert none.values().tolist() == []
    assert [(t.name, t.shape, t.kind.name, t.nbytes) for t in result.tensors.values()] == [
        ("a", (4,), "F32", 16),
        ("b", (4,), "F32", 16),
    ]
    assert result.tensors["b"].offset == path.stat().st_size - 32


def test_reads_files_of_gguf_py(tmp_path: Path) -> None:
    arrays = {
        "x": (np.arange(24, dtype=np.float32).reshape(2, 3, 4), DTYPE.F32),
        "y": (np.zeros((2, 2 * 144), np.uint8), DTYPE.Q4_K),
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", {"general.alignment": 64, ".n": 3}, arrays)
    result = read_gguf(path)
    reader = gguf.GGUFReader(path)
    assert result.keys["llama.n"] == 3
    for tensor in reader.tensors:
        actual = result.tensors[tensor.name]
        assert actual.offset == tensor.data_offset
        assert actual.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert actual.nbytes == tensor.n_bytes


def test_which_files_are_recognized_as_gguf(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(GOOD.packed())
    (tmp_path / "other").write_bytes(b"GGU")
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(tmp_path / "blob")
    assert is_gguf(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path)


HUGE = 1 << 62
BAD: dict[str, tuple[RawFile | bytes, str]] = {
    "empty": (b"", "no GGUF file \\(0 bytes"),
    "magic": (replace(GOOD, magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (replace(GOOD, version=1), "of version 1, versions 2 and 3 are read"),
    "version 4": (replace(GOOD, version=4), "of version 4"),
    "big endian": (replace(GOOD, version=3 << 24), "big-endian"),
    "many tensors": (replace(GOOD, tensor_count=HUGE), f"{HUGE} tensors"),
    "many keys": (replace(GOOD, key_count=HUGE), f"{HUGE} keys"),
    "one more key": (replace(GOOD, key_count=2), "."),
    "one more tensor": (replace(GOOD, tensor_count=3), "."),
    "long name": (replace(GOOD, keys=(Key("x" * 70000, U8, b"\0"),)), "at most 65536"),
    "long text": (GOOD.with_key("t", TEXT, text("x", 1 << 60)), f"t is said to have {1 << 60}"),
    "no text": (GOOD.with_key("t", TEXT, text(b"\xff")), "t is not UTF-8"),
    "same key": (GOOD.with_key("general.architecture", TEXT, text("x")), "stands there twice"),
    "key type": (GOOD.with_key("t", 13, b"\0"), "type number 13"),
    "item type": (GOOD.with_key("t", ARRAY, array(99, [])), "type number 99"),
    "nested": (GOOD.with_key("t", ARRAY, array(ARRAY, [array(U8, [])])), "arrays of arrays"),
    "deeply nested": (
        GOOD.with_key("t", ARRAY, array(ARRAY, [struct.pack("<IQ", ARRAY, 1) * 10000])),
        "arrays of arrays",
    ),
    "many numbers": (GOOD.with_key("t", ARRAY, array(U32, [], HUGE)), f"{HUGE} values of t"),
    "many texts": (GOOD.with_key("t", ARRAY, array(TEXT, [], HUGE)), f"{HUGE} values of t"),
    "a long item": (GOOD.with_key("t", ARRAY, array(TEXT, [text("", 1 << 63)])), "truncated"),
    "alignment 0": (GOOD.with_key("general.alignment", U32, number(U32, 0)), "power of two"),
    "alignment 48": (GOOD.with_key("general.alignment", U32, number(U32, 48)), "power of two"),
    "alignment true": (GOOD.with_key("general.alignment", BOOL, b"\1"), "power of two"),
    "alignment 0.5": (GOOD.with_key("general.alignment", F32, number(F32, 0.5)), "power of two"),
    "long tensor name": (replace(GOOD, infos=(Info("x" * 2000),)), "at most 1024"),
    "no axes": (replace(GOOD, infos=(Info("a", ()),)), "0 axes"),
    "five axes": (replace(GOOD, infos=(Info("a", (1,) * 5),)), "5 axes"),
    "empty axis": (replace(GOOD, infos=(Info("a", (4, 0)),)), "fits no file"),
    "product": (replace(GOOD, infos=(Info("a", (1 << 31, 1 << 31, 1 << 31)),)), "fits no file"),
    "type 16": (replace(GOOD, infos=(Info("a", kind=16),)), "tensor a has the type IQ2_XXS"),
    "type 999": (replace(GOOD, infos=(Info("a", kind=999),)), "tensor a has the type number 999"),
    "row": (replace(GOOD, infos=(Info("a", (48,), 12),)), "rows of 48, Q4_K stores 256"),
    "unaligned": (replace(GOOD, infos=(Info("a", offset=4),)), "no multiple of 32"),
    "outside": (replace(GOOD, infos=(Info("a", offset=1 << 40),)), "truncated"),
    "huge offset": (replace(GOOD, infos=(Info("a", offset=2**64 - 32),)), "fits no file"),
    "overlap": (replace(GOOD, infos=(Info("a", (9,)), Info("b", offset=32))), "a and b overlap"),
    "same place": (replace(GOOD, infos=(Info("a"), Info("b"))), "overlap"),
    "same tensor": (replace(GOOD, infos=(Info("a"), Info("a", offset=32))), "a stands there twice"),
    "cut data": (GOOD.packed()[:-50], "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_rejects_damaged_files(tmp_path: Path, name: str) -> None:
    file, message = BAD[name]
    data = file if isinstance(file, bytes) else file.packed()
    assert re.search(message, refusal(tmp_path / "model.gguf", data))


def test_rejects_a_file_truncated_anywhere(tmp_path: Path) -> None:
    data = GOOD.with_key("t", ARRAY, array(TEXT, [text("one"), text("two")])).packed()
    for length in range(0, len(data) - 20, 5):
        refusal(tmp_path / "model.gguf", data[:length])


def test_many_empty_strings_are_read_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that consists of lengths of zero has a string every eight bytes."""
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD.with_key("t", ARRAY, array(TEXT, [bytes(4 << 20)], 1 << 19)).packed())
    started = time.process_time()
    assert len(read_gguf(path).keys) == 2
    assert time.process_time() - started < 1
    monkeypatch.setattr(container, "_MAX_VALUES", 1 << 10)
    many = GOOD
    for name in "uvw":
        many = many.with_key(name, ARRAY, array(TEXT, [bytes(8 * 400)], 400))
    assert "w brings its keys to more values" in refusal(path, many.packed())


def split(folder: Path, parts: int = 3) -> Path:
    rows = {f"t{n}": (np.full((1, 32), n, np.float32), DTYPE.F32) for n in range(parts)}
    return write_gguf(folder / "m.gguf", "llama", {".n": 1}, rows, tensors_a_file=1)


def patched(path: Path, key: str, value: int, width: int) -> None:
    """Return the data with another number for a key."""
    data = bytearray(path.read_bytes())
    place = data.index(key.encode()) + len(key) + 4
    data[place : place + width] = value.to_bytes(width, "little")
    path.write_bytes(data)


def test_split_files(tmp_path: Path) -> None:
    first = split(tmp_path)
    model = open_model(first)
    assert sorted(model.tensors) == ["t0", "t1", "t2"]
    assert [file.name for file in model.files] == [
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    assert model.keys["llama.n"] == 1


def test_rejects_parts_of_different_files(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(SpecbuildError) as caught:
            open_model(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    first = split(tmp_path)
    second, third = (tmp_path / f"m-0000{n}-of-00003.gguf" for n in (2, 3))
    assert f"not the first of 3 parts; give {first}" in said(second)
    original = second.read_bytes()
    second.unlink()
    assert "m-00002-of-00003.gguf not in" in said(first)
    second.symlink_to(first)  # a cycle
    assert "part 1 of 3, its name says 2 of 3" in said(first)
    second.unlink()
    second.write_bytes(third.read_bytes())
    assert "part 3 of 3, its name says 2 of 3" in said(first)
    patched(second, "split.no", 1, 2)
    assert "t2 also in m-00002-of-00003.gguf" in said(first)
    second.write_bytes(original)
    patched(first, "split.tensors.count", 7, 4)
    assert "hold 3 tensors, split.tensors.count says 7" in said(first)
    patched(first, "split.count", 60000, 2)
    assert "one of 60000 parts, which are found by their names" in said(first)
    moved = first.rename(tmp_path / "other.gguf")
    patched(moved, "split.count", 3, 2)
    assert "call them NAME-00001-of-00003.gguf" in said(moved)
