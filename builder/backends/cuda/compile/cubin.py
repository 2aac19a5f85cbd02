"""What a cubin says of its entries' parameters: an ELF file with a section of notes for each."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_INFO = b".nv.info."
_PARAMETER = 0x17  # EIATTR_KPARAM_INFO: index u32, ordinal u16, offset u16, and the size in a word
_SIZED = 0x04  # a note whose value has a length; those of the other formats hold 16 bits
_SECTION = struct.Struct("<IIQQQQIIQQ")


def parameter_sizes(data: bytes, entry: str) -> tuple[int, ...]:
    """Bytes of every parameter of a kernel, in order; KeyError where the cubin lacks the entry."""
    wanted = _INFO + entry.encode()
    for name, section in _sections(data):
        if name == wanted:
            found = dict(_parameters(section))
            return tuple(found[ordinal] for ordinal in sorted(found))
    raise KeyError(f"the cubin has no entry {entry!r}")


def _sections(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    count, names_index = struct.unpack_from("<HH", data, 0x3C)
    headers = [_SECTION.unpack_from(data, table + i * _SECTION.size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        start = names + header[0]
        yield data[start : data.index(b"\0", start)], data[header[4] : header[4] + header[5]]


def _parameters(notes: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(notes):
        form, kind, value = struct.unpack_from("<BBH", notes, at)
        at += 4
        if form != _SIZED:
            continue
        if kind == _PARAMETER:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", notes, at)
            yield ordinal, packed >> 18
        at += value
