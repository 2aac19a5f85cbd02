"""Write the parts of a cubin that describe the parameters of its kernels; it has no code."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

PARAMETER, BANK, BANK_BYTES = 0x17, 0x0A, 0x19


def note(kind: int, value: bytes) -> bytes:
    """Return a note after its length."""
    return struct.pack("<BBH", 4, kind, len(value)) + value


def parameter(ordinal: int, offset: int, size: int) -> bytes:
    """Return the note of a parameter."""
    return note(PARAMETER, struct.pack("<IHHI", 0, ordinal, offset, size << 18 | 0x1F000))


def kernel_notes(sizes: Sequence[int]) -> bytes:
    """Return the notes of NVIDIA's compiler for a kernel's parameters, the last one first."""
    notes, end = [struct.pack("<BBH", 2, 0x4C, 7)], 0
    for ordinal, size in enumerate(sizes):
        offset = -(-end // size) * size
        notes.append(parameter(ordinal, offset, size))
        end = offset + size
    bank = note(BANK, struct.pack("<IHH", 1, 528, end))
    return b"".join([*reversed(notes), bank, struct.pack("<BBH", 3, BANK_BYTES, end)])


def toy_cubin(kernels: Mapping[str, Sequence[int] | bytes]) -> bytes:
    """Return a cubin of these kernels, given by the sizes of parameters or by their notes."""
    names = [b"", b".shstrtab", *(f".nv.info.{entry}".encode() for entry in kernels)]
    marks = b"".join(f"cubin of {entry}\n".encode() for entry in kernels)
    bodies = [k if isinstance(k, bytes) else kernel_notes(k) for k in kernels.values()]
    table = b"\0".join(names) + b"\0"
    contents = [b"", table, *bodies]
    start = 64 + len(marks)
    headers = []
    for name, kind, body in zip(names, [0, 3, *[0x70000000] * len(kernels)], contents, strict=True):
        at = table.index(name + b"\0") if name else 0
        headers.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, start, len(body), 0, 0, 1, 0))
        start += len(body)
    ident = b"\x7fELF" + bytes([2, 1, 1, 0x41, 8]) + bytes(7)
    fields = (2, 190, 2, 0, 0, start, 0, 64, 0, 0, 64, len(headers), 1)
    header = ident + struct.pack("<HHIQQQIHHHHHH", *fields)
    return b"".join([header, marks, *contents, *headers])
