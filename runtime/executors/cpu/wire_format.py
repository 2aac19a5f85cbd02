"""Protobuf's wire format, parsed strictly: the fields of one message.

A message is refused if it has a field that its ``Schema`` does not list, a repeated occurrence of a
singular field, or a varint longer than necessary for 64 bits. Any other library therefore finds the
same fields in the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

# A message or string in the bytes: its start and end.
Span: TypeAlias = tuple[int, int]
# Values of each present field: integers (a varint, unsigned), or spans.
Fields: TypeAlias = dict[int, list[int | Span]]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_VARINT_BYTES = 10
_TAG_BYTES = 5


class Field(NamedTuple):
    """The encoding of a field: its wire type, and whether it may be repeated.

    ``packed``: a run of values may also be one string of bytes.
    """

    wire: int
    repeated: bool = False
    packed: bool = False


Schema: TypeAlias = Mapping[int, Field]


class WireError(ValueError):
    """The bytes are not such a message; the text is the reason, as the end of a sentence."""


def fields_of(data: bytes, span: Span, schema: Schema, name: str) -> Fields:
    """Return the fields of the message in ``span``, by number; ``name`` is its kind.

    Raises WireError.
    """
    at, end = span
    fields_found: Fields = {}
    while at < end:
        # Most tags and sizes are one byte: a call for each would take twice as long.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at, end, _TAG_BYTES)
        number, wire = tag >> 3, tag & 7
        field = schema.get(number)
        if field is None:
            raise WireError(f"a {name} has field {number}, which no engine's graph has")
        if wire != field.wire and not (field.packed and wire == BYTES):
            raise WireError(f"field {number} of a {name} has wire type {wire}")
        if wire in _FIXED_BYTES:
            size = _FIXED_BYTES[wire]
        elif at < end and data[at] < 0x80:
            size, at = data[at], at + 1
        else:
            size, at = _varint(data, at, end, _VARINT_BYTES)
        value: int | Span = size
        if wire != VARINT:
            value, at = (at, at + size), at + size
            if at > end:
                raise WireError(f"field {number} of a {name} ends outside of it")
        if number not in fields_found:
            fields_found[number] = [value]
        elif field.repeated:
            fields_found[number].append(value)
        else:
            raise WireError(f"a {name} has field {number} twice")
    return fields_found


def numbers_of(data: bytes, values: list[int | Span]) -> list[int]:
    """Return the varints of a repeated field, packed or not."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at, end = value
        while at < end:
            number, at = _varint(data, at, end, _VARINT_BYTES)
            numbers.append(number)
    return numbers


def text_of(data: bytes, value: int | Span) -> str:
    """Return a string; WireError if it is not UTF-8."""
    assert not isinstance(value, int)
    try:
        return data[value[0] : value[1]].decode()
    except UnicodeDecodeError as error:
        raise WireError("a name is not UTF-8") from error


def _varint(data: bytes, at: int, end: int, most_bytes: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    if at < end and (value := data[at]) < 0x80:
        return value, at + 1
    value = shift = 0
    for place in range(at, min(end, at + most_bytes)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise WireError("a number has more than 64 bits")
            return value, place + 1
        shift += 7
    raise WireError("a number ends outside of its message, or has too many bytes")
