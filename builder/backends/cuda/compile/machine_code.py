"""Extracts the parts of a cubin that a GPU executes, by kernel, without names and debug data.

Two kernels with equal :class:`MachineCode` behave identically on the GPU. The parts are the
instructions and their relocations, the notes that the driver needs for launches (registers, stack,
barriers, parameters, offsets of instructions), shared memory, the bank of parameters, and the
constants that the instructions load. Omitted are the names and the order of symbols, debug frames,
the compiler's note, and constants that no instruction loads: NVRTC stores every ``constexpr`` of
the source in the cubin, used or not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from specbuild.runtime.executors.cuda.cubin import Section, read_notes, sections

_TEXT, _SHARED, _BANK = b".text.", b".nv.shared.", b".nv.constant"
_SYMBOLS, _NO_BITS = 2, 8  # SHT_SYMTAB, SHT_NOBITS
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
# Notes that start with symbol numbers: a list of external symbols, and the bank of parameters.
_EXTERNS, _PARAMETERS = 0x0F, 0x0A
_INSTRUCTION = struct.Struct("<QQ")
# Bits 9 to 11 of an instruction are the form of its operands. In two forms an operand is in a
# constant bank, whose number is in bits 54 to 58.
_FORM_BIT, _CONSTANT_FORMS, _BANK_BIT = 9, (3, 5), 54
# In a barrier (BAR) the same bits have another meaning.
_OPCODE_MASK, _BARRIER = 0x1FF, 0x11D
_PARAMETER_BANK, _ADDRESS_BANK = 0, 4


@dataclass(frozen=True)
class MachineCode:
    """The parts of one kernel by name."""

    parts: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """A digest over all bits of all parts."""
        digest = xxhash.xxh3_128()
        for name, part in sorted(self.parts.items()):
            digest.update(f"{name} {len(part)}\0".encode() + part)
        return digest.hexdigest()


def machine_code(cubin: bytes, where: str) -> dict[str, MachineCode]:
    """Return the machine code of every kernel of a cubin, by entry.

    Raises EngineFileError or struct.error if ``cubin`` is not a valid cubin.
    """
    file = _Cubin(cubin, where)
    texts = {name: s for name, s in file.sections.items() if name.startswith(_TEXT)}
    kernels = {}
    for name, text in texts.items():
        entry = name.removeprefix(_TEXT)
        kernels[entry.decode()] = MachineCode(dict(file.parts(entry, text)))
    return kernels


@dataclass(frozen=True)
class _Symbol:
    name: bytes
    section: int
    start: int
    nbytes: int


class _Cubin:
    """A cubin's sections by name and its symbols by number."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        self._ordered = list(sections(data, where))
        self.sections = {section.name: section for section in self._ordered}
        self._symbols = list(self._read_symbols())

    def parts(self, entry: bytes, text: Section) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the kernel's parts."""
        code = self._content(text)
        yield "text", code
        yield "text's flags", text.flags.to_bytes(8, "little")
        yield "relocations", self._relocations(_TEXT + entry)
        yield "notes", b"".join(self._notes(entry))
        shared = self.sections.get(_SHARED + entry)
        if shared is not None:
            yield "shared memory", struct.pack("<QQ", shared.nbytes, shared.alignment)
        parameters = self.sections.get(_BANK + b"%d." % _PARAMETER_BANK + entry)
        if parameters is not None:
            yield "parameters", self._content(parameters)
        for bank in sorted(loaded_banks(code) - {_PARAMETER_BANK}):
            content = self._bank(bank, entry)
            if content:
                yield f"bank {bank}", content

    def _bank(self, bank: int, entry: bytes) -> bytes:
        """Return the contents of a bank. Addresses are replaced by the contents at the address."""
        own, common = (_BANK + b"%d" % bank + end for end in (b"." + entry, b""))
        content = b"".join(
            self._content(self.sections[name]) for name in (own, common) if name in self.sections
        )
        if bank != _ADDRESS_BANK:
            return content
        return content + b"".join(
            struct.pack("<Q", place) + self._pointed_to(number) + struct.pack("<q", addend)
            for place, number, addend in sorted(self._relocated(common))
        )

    def _pointed_to(self, number: int) -> bytes:
        symbol = self._symbols[number]
        section = self._ordered[symbol.section]
        if section.kind == _NO_BITS:
            return bytes(symbol.nbytes)
        return self._content(section)[symbol.start : symbol.start + symbol.nbytes]

    def _relocations(self, name: bytes) -> bytes:
        return b"".join(
            struct.pack("<Qq", place, addend) + self._symbols[number].name + b"\0"
            for place, number, addend in sorted(self._relocated(name))
        )

    def _relocated(self, name: bytes) -> Iterator[tuple[int, int, int]]:
        section = self.sections.get(b".rela" + name)
        if section is not None:
            for place, _, number, addend in _RELOCATION.iter_unpack(self._content(section)):
                yield place, number, addend

    def _notes(self, entry: bytes) -> Iterator[bytes]:
        """Yield the kernel's notes and its entries of the common notes, without symbol numbers."""
        own = self._content(self.sections[b".nv.info." + entry])
        for kind, value in read_notes(own, self._where):
            yield struct.pack("<II", kind, len(value))
            if kind == _EXTERNS:
                numbers = (number for (number,) in struct.iter_unpack("<I", value))
                yield b"\0".join(self._symbols[number].name for number in numbers)
            else:
                yield value[4:] if kind == _PARAMETERS else value
        common = self._content(self.sections[b".nv.info"])
        entries = []
        for kind, value in read_notes(common, self._where):
            number = int.from_bytes(value[:4], "little")
            if self._symbols[number].name == entry:
                entries.append(struct.pack("<II", kind, len(value)) + value[4:])
        yield from sorted(entries)

    def _read_symbols(self) -> Iterator[_Symbol]:
        for table in (s for s in self._ordered if s.kind == _SYMBOLS):
            names = self._content(self._ordered[table.link])
            for start, _, _, section, at, nbytes in _SYMBOL.iter_unpack(self._content(table)):
                name = names[start:].partition(b"\0")[0]
                yield _Symbol(name, section, at, nbytes)

    def _content(self, section: Section) -> bytes:
        return section.content(self._data, self._where)


def loaded_banks(code: bytes) -> set[int]:
    """Return the constant banks that instructions read, and possibly banks that none reads."""
    return {
        low >> _BANK_BIT & 0x1F
        for low, _ in _INSTRUCTION.iter_unpack(code)
        if low >> _FORM_BIT & 7 in _CONSTANT_FORMS and low & _OPCODE_MASK != _BARRIER
    }
