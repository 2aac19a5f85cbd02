"""Reads numbers and texts of a mapped file one after the other, never beyond its end."""

from __future__ import annotations

import mmap
import struct

from specbuild.runtime.errors import SpecbuildError

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A place in a mapped file; every reader moves it on.

    Readers raise SpecbuildError where the file ends before what is read, or describes more than
    any model has. ``budget`` is how many texts and numbers of headers may still follow.
    """

    def __init__(self, where: str, data: mmap.mmap, budget: int) -> None:
        self.where, self.data = where, data
        self.place, self.end = 0, len(data)
        self.budget = budget

    def u32(self, what: str) -> int:
        """An unsigned number of 4 bytes."""
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        """An unsigned number of 8 bytes."""
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def number(self, layout: struct.Struct, what: str) -> int | float | bool:
        """A number of this layout."""
        value: int | float | bool = layout.unpack_from(self.data, self.skip(layout.size, what))[0]
        return value

    def text(self, what: str, most: int) -> str:
        """A text of at most ``most`` bytes, behind its length."""
        length = self.u64(what)
        if length > most:
            raise SpecbuildError(
                f"{self.where}: {what} is said to have {length} bytes, at most {most} are read; "
                "the file is damaged, download it again"
            )
        start = self.skip(length, what)
        return decoded(self.where, what, self.data[start : start + length])

    def count(self, what: str, least_bytes: int, most: int) -> int:
        """How many things of at least ``least_bytes`` follow; no more than ``most``, or fit."""
        number = self.u64(what)
        if number > most or number * least_bytes > self.end - self.place:
            raise SpecbuildError(
                f"{self.where}: is said to hold {number} {what}, more than its {self.end} bytes "
                "can; the file is damaged, download it again"
            )
        return number

    def spend(self, number: int, what: str) -> None:
        """Counts ``number`` more texts or numbers of headers."""
        self.budget -= number
        if self.budget < 0:
            raise SpecbuildError(
                f"{self.where}: {what} brings its keys to more values than any model has; the "
                "file is damaged, download it again"
            )

    def skip(self, nbytes: int, what: str) -> int:
        """Moves on by ``nbytes``; where they begin."""
        start = self.place
        if nbytes > self.end - start:
            raise SpecbuildError(
                f"{self.where}: ends within {what} (byte {self.end}); the file is truncated, "
                "download it again"
            )
        self.place = start + nbytes
        return start

    def skip_texts(self, number: int, what: str) -> int:
        """Moves on by ``number`` texts; where they begin."""
        start = place = self.place
        data, end, length_at = self.data, self.end, _U64.unpack_from
        for _ in range(number):
            if place + 8 > end:
                break
            place += 8 + length_at(data, place)[0]
        else:
            if place <= end:
                self.place = place
                return start
        raise SpecbuildError(
            f"{self.where}: ends within {what} (byte {end}); the file is truncated, download it "
            "again"
        )


def decoded(where: str, what: str, raw: bytes) -> str:
    """UTF-8 as text. SpecbuildError where it is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise SpecbuildError(f"{where}: {what} is not UTF-8 ({error.reason})") from None
