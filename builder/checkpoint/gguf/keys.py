"""The keys of a GGUF file and their values; arrays stay in the mapped file until they are used."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specbuild.builder.checkpoint.gguf.cursor import Cursor, decoded
from specbuild.runtime.errors import SpecbuildError

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _ARRAY = 8, 9
_LAYOUTS = {
    number: struct.Struct(f"<{letter}")
    for number, letter in zip(_NUMBERS, "BbHhIif?Qqd", strict=True)
}
# Maximum sizes of a key's name, of a text such as a chat template, and of the texts of an array.
_MAX_NAME_BYTES, _MAX_TEXT_BYTES, _MAX_TEXTS = 1 << 16, 1 << 24, 1 << 22
_MAX_KEYS = 1 << 16


@dataclass(frozen=True)
class NumberArray:
    """Numbers of one type, in the mapped file."""

    where: str
    data: mmap.mmap
    start: int
    count: int
    dtype: str

    def values(self) -> np.ndarray:
        """All numbers [count]; a read-only view of the file."""
        return np.frombuffer(self.data, self.dtype, self.count, self.start)


@dataclass(frozen=True)
class TextArray:
    """Texts, in the mapped file."""

    where: str
    data: mmap.mmap
    start: int
    count: int

    def values(self) -> list[str]:
        """All texts. SpecbuildError if one is not UTF-8."""
        found, place = [], self.start
        data, length_at = self.data, struct.Struct("<Q").unpack_from
        for number in range(self.count):
            stop = place + 8 + length_at(data, place)[0]
            raw = data[place + 8 : stop]
            try:
                found.append(raw.decode())
            except UnicodeDecodeError:
                decoded(self.where, f"text {number}", raw)
            place = stop
        return found


Value: TypeAlias = int | float | bool | str | NumberArray | TextArray


def read_keys(cursor: Cursor, number: int) -> dict[str, Value]:
    """Return the next ``number`` keys by name. SpecbuildError if one is damaged or repeated."""
    found: dict[str, Value] = {}
    for _ in range(number):
        name = cursor.text("the name of a key", _MAX_NAME_BYTES)
        if name in found:
            raise SpecbuildError(f"{cursor.where}: the key {name} stands there twice")
        kind = cursor.u32(f"the type of {name}")
        found[name] = _array(cursor, name) if kind == _ARRAY else _single(cursor, name, kind)
    return found


def key_count(cursor: Cursor) -> int:
    """Return the number of following keys."""
    return cursor.count("keys", least_bytes=13, most=_MAX_KEYS)


def _single(cursor: Cursor, name: str, kind: int) -> int | float | bool | str:
    cursor.spend(1, name)
    if kind == _TEXT:
        return cursor.text(name, _MAX_TEXT_BYTES)
    return cursor.number(_LAYOUTS[_known(cursor, name, kind)], name)


def _array(cursor: Cursor, name: str) -> NumberArray | TextArray:
    kind = cursor.u32(f"the type of {name}")
    if kind == _ARRAY:
        raise SpecbuildError(f"{cursor.where}: the key {name} holds arrays of arrays; none is read")
    what = f"values of {name}"
    if kind == _TEXT:
        count = cursor.count(what, least_bytes=8, most=_MAX_TEXTS)
        cursor.spend(count, name)
        start = cursor.skip_texts(count, name)
        return TextArray(f"{cursor.where}: {name}", cursor.data, start, count)
    dtype = _NUMBERS[_known(cursor, name, kind)]
    nbytes = np.dtype(dtype).itemsize
    count = cursor.count(what, least_bytes=nbytes, most=cursor.end)
    start = cursor.skip(count * nbytes, name)
    return NumberArray(f"{cursor.where}: {name}", cursor.data, start, count, dtype)


def _known(cursor: Cursor, name: str, kind: int) -> int:
    if kind not in _NUMBERS:
        raise SpecbuildError(
            f"{cursor.where}: the key {name} has the type number {kind}, which does not exist; "
            "the file is damaged, download it again"
        )
    return kind
