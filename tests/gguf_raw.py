"""GGUF files byte by byte, so that each of their parts can be wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

U8, U32, F32, BOOL, TEXT, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
_LETTERS = {U8: "B", U32: "I", F32: "f", BOOL: "?", U64: "Q"}


def text(value: bytes | str, length: int | None = None) -> bytes:
    """Return a text after its length, or after a wrong length."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def number(kind: int, value: float) -> bytes:
    """Return a number of this type."""
    return struct.pack(f"<{_LETTERS[kind]}", value)


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    """Return an array: its type, its length or a wrong one, its items."""
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


@dataclass(frozen=True)
class Key:
    """A key: its name, and a value of this type as bytes."""

    name: str
    kind: int
    value: bytes

    def packed(self) -> bytes:
        return text(self.name) + struct.pack("<I", self.kind) + self.value


@dataclass(frozen=True)
class Info:
    """The entry of a tensor: ``dims`` fastest first, a type number, an offset in the data."""

    name: str
    dims: tuple[int, ...] = (4,)
    kind: int = 0
    offset: int = 0

    def packed(self) -> bytes:
        head = text(self.name) + struct.pack("<I", len(self.dims))
        return head + struct.pack(f"<{len(self.dims)}QIQ", *self.dims, self.kind, self.offset)


@dataclass(frozen=True)
class RawFile:
    """A file. Counts that are None are correct."""

    keys: tuple[Key, ...] = (Key("general.architecture", TEXT, text("llama")),)
    infos: tuple[Info, ...] = (Info("a"), Info("b", offset=32))
    data: bytes = field(default=bytes(64))
    magic: bytes = b"GGUF"
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None

    def packed(self) -> bytes:
        tensors = len(self.infos) if self.tensor_count is None else self.tensor_count
        keys = len(self.keys) if self.key_count is None else self.key_count
        head = self.magic + struct.pack("<IQQ", self.version, tensors, keys)
        head += b"".join(part.packed() for part in (*self.keys, *self.infos))
        return head + bytes(-len(head) % 32) + self.data

    def with_key(self, name: str, kind: int, value: bytes) -> RawFile:
        return replace(self, keys=(*self.keys, Key(name, kind, value)))
