"""Reads the parameters of kernels from a cubin: an ELF file with a section of notes for each.

The file is not trusted: every offset is checked against its size, and any form that NVIDIA's
compiler does not write is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specbuild.runtime.errors import EngineFileError, OutdatedEngineError

# An argument of a launch is a pointer, or 32 bits.
PARAMETER_BYTES = (4, 8)
_MAX_SECTIONS = 4096
_MACHINE = 190  # EM_CUDA
_NOTES = 0x70000000  # SHT_CUDA_INFO
_NAME = b".nv.info."
_HEADER = struct.Struct("<4sBB10x2xH20xQ4x6xHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOTE = struct.Struct("<BBH")
# Formats of notes: with a length first, or with 16 bits as the value.
_SHORT, _SIZED = (1, 2, 3), 4
_PARAMETER, _BANK, _BANK_BYTES = 0x17, 0x0A, 0x19
_PARAMETER_NOTE = struct.Struct("<IHHI")  # index, ordinal, offset, and the size in a word
_BANK_NOTE = struct.Struct("<IHH")  # symbol, offset, bytes
_SIZE_SHIFT = 18

Signatures = Mapping[str, tuple[int, ...]]


def kernel_parameters(data: bytes, where: str) -> Signatures:
    """Return the bytes of every kernel's parameters in order, by entry; each has 4 or 8.

    Raises EngineFileError if ``data`` is no cubin, is truncated or has unknown contents.
    """
    try:
        return {
            name.decode("ascii"): _parameters(notes, where) for name, notes in _kernels(data, where)
        }
    except (struct.error, UnicodeDecodeError) as error:
        raise _refusal(where, str(error)) from error


@dataclass(frozen=True)
class Section:
    """The place of a section in the file, and its header.

    ``link`` and ``info`` are numbers of other sections or symbols, by the section's ``kind``.
    """

    name: bytes
    kind: int
    flags: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int

    def content(self, data: bytes, where: str) -> bytes:
        """Return its bytes. Raises EngineFileError if they are outside the file."""
        return _slice(data, self.offset, self.nbytes, where)


def sections(data: bytes, where: str) -> Iterator[Section]:
    """Return every section of a cubin, in the file's order.

    Raises EngineFileError or struct.error if ``data`` is invalid or truncated.
    """
    magic, bits, order, machine, table, entry_size, count, names_index = _HEADER.unpack_from(data)
    if (magic, bits, order, machine) != (b"\x7fELF", 2, 1, _MACHINE):
        raise _refusal(where, "no ELF file of NVIDIA's")
    if entry_size != _SECTION.size or not names_index < count <= _MAX_SECTIONS:
        raise _refusal(where, "its table of sections is malformed")
    headers = list(_SECTION.iter_unpack(_slice(data, table, count * _SECTION.size, where)))
    names = _slice(data, headers[names_index][4], headers[names_index][5], where)
    for start, kind, flags, _, offset, nbytes, link, info, alignment, _ in headers:
        name = _slice(names, start, len(names) - start, where).partition(b"\0")[0]
        yield Section(name, kind, flags, offset, nbytes, link, info, alignment)


def _kernels(data: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield every kernel's name and notes."""
    ordinals = set()
    for section in sections(data, where):
        if section.kind != _NOTES or not section.name.startswith(_NAME):
            continue
        if section.name in ordinals:
            raise _refusal(where, "a kernel has notes twice")
        ordinals.add(section.name)
        yield section.name.removeprefix(_NAME), section.content(data, where)


def _parameters(notes: bytes, where: str) -> tuple[int, ...]:
    """Return sizes by ordinal; they must fill the parameter bank, each aligned to its size."""
    sizes: dict[int, tuple[int, int]] = {}
    banks = set()
    for kind, value in read_notes(notes, where):
        if kind == _PARAMETER:
            _, ordinal, offset, packed = _PARAMETER_NOTE.unpack(value)
            if ordinal in sizes:
                raise _refusal(where, f"a kernel has parameter {ordinal} twice")
            sizes[ordinal] = (offset, packed >> _SIZE_SHIFT)
        elif kind == _BANK:
            banks.add(_BANK_NOTE.unpack(value)[2])
        elif kind == _BANK_BYTES:
            banks.add(int.from_bytes(value, "little"))
    end = 0
    for ordinal in range(len(sizes)):
        offset, size = sizes.get(ordinal, (0, 0))
        if size not in PARAMETER_BYTES or offset != -(-end // size) * size:
            raise _refusal(where, f"parameter {ordinal} of a kernel has {size} bytes at {offset}")
        end = offset + size
    if (banks or {0}) != {end}:
        raise _refusal(where, f"a kernel's parameters are {end} bytes and {sorted(banks)}")
    return tuple(sizes[ordinal][1] for ordinal in range(len(sizes)))


def read_notes(notes: bytes, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the value of every note of a section. Raises as :func:`sections`."""
    at = 0
    while at < len(notes):
        form, kind, value = _NOTE.unpack_from(notes, at)
        at += _NOTE.size
        if form == _SIZED:
            yield kind, _slice(notes, at, value, where)
            at += value
        elif form in _SHORT:
            yield kind, notes[at - 2 : at]
        else:
            raise _refusal(where, f"a note is of format {form}")


def _slice(data: bytes, start: int, size: int, where: str) -> bytes:
    if not 0 <= start <= start + size <= len(data):
        raise _refusal(where, "a part lies outside the file")
    return data[start : start + size]


def _refusal(where: str, reason: str) -> EngineFileError:
    return OutdatedEngineError(f"{where} is no cubin as it is expected ({reason})")
