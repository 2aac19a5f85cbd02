"""Reads numbers and texts of a mapped file in sequence, never beyond its end."""

from __future__ import annotations

import mmap
import struct

from specbuild.runtime.errors import SpecbuildError

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A position in a mapped file, which every reader advances.

    Readers raise SpecbuildError if the file is truncated, or describes more than any model has.
    ``budget`` is the remaining number of texts and numbers of headers.
    """

    def __init__(self, where: str, data: mmap.mmap, budget: int) -> None:
        self.where, self.data = where, data
        self.place, self.end = 0, len(data)
        self.budget = budget

    def u32(self, what: str) -> int:
        """Return an unsigned 4-byte integer."""
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        """Return an unsigned 8-byte integer."""
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def number(self, layout: struct.Struct, what: str) -> int | float | bool:
        """Return a number with this layout."""
        value: int | float | bool = layout.unpack_from(self.data, self.skip(layout.size, what))[0]
        return value

    def text(self, what: str, most: int) -> str:
        """Return a text of at most ``most`` bytes, after its length."""
        length = self.u64(what)
        if length > most:
            raise SpecbuildError(
                f"{self.where}: {what} is said to have {length} bytes, at most {most} are read; "
                "the file is damaged, download it again"
            )
        start = self.skip(length, what)
        return decoded(self.where, what, self.data[start : start + length])

    def count(self, what: str, least_bytes: int, most: int) -> int:
        """Return a count of items of at least ``least_bytes``, limited by ``most`` and the file."""
        number = self.u64(what)
        if number > most or number * least_bytes > self.end - self.place:
            raise SpecbuildError(
                f"{self.where}: is said to hold {number} {what}, more than its {self.end} bytes "
                "can; the file is damaged, download it again"
            )
        return number

    def spend(self, number: int, what: str) -> None:
        """Subtract ``number`` texts or numbers of headers from the budget."""
        self.budget -= number
        if self.budget < 0:
            raise SpecbuildError(
                f"{self.where}: {what} brings its keys to more values than any model has; the "
                "file is damaged, download it again"
            )

    def skip(self, nbytes: int, what: str) -> int:
        """Advance by ``nbytes``; return their start."""
        start = self.place
        if nbytes > self.end - start:
            raise SpecbuildError(
                f"{self.where}: ends within {what} (byte {self.end}); the file is truncated, "
                "download it again"
            )
        self.place = start + nbytes
        return start

    def skip_texts(self, number: int, what: str) -> int:
        """Advance by ``number`` texts; return their start."""
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
    """Return UTF-8 as text. SpecbuildError if it is invalid."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise SpecbuildError(f"{where}: {what} is not UTF-8 ({error.reason})") from None
