"""Changes of a file's bytes that know nothing of what they mean."""

from __future__ import annotations

from random import Random

_EDGES = (0, 1, 0x7F, 0x80, 0xFF)
_LONGEST = 64


def mutated_bytes(random: Random, data: bytes) -> tuple[bytes, str]:
    """Other bytes, and what was done to them; never the same bytes."""
    for _ in range(20):
        name, change = random.choice(_CHANGES)
        start = random.randrange(len(data) + 1)
        length = random.randint(1, _LONGEST)
        changed = change(random, data, start, length)
        if changed != data:
            return changed, f"{name} at {start}"
    return data + b"\0", "append at the end"


def _flip(random: Random, data: bytes, start: int, _length: int) -> bytes:
    flipped = bytes(byte ^ 1 << random.randrange(8) for byte in data[start : start + 1])
    return data[:start] + flipped + data[start + 1 :]


def _set(random: Random, data: bytes, start: int, _length: int) -> bytes:
    return data[:start] + bytes([random.choice(_EDGES)]) + data[start + 1 :]


def _number(random: Random, data: bytes, start: int, _length: int) -> bytes:
    width = random.choice((2, 4, 8))
    value = random.choice((0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width) - 1))
    return data[:start] + value.to_bytes(width, "little") + data[start + width :]


def _noise(random: Random, data: bytes, start: int, length: int) -> bytes:
    return data[:start] + random.randbytes(length) + data[start + length :]


def _insert(random: Random, data: bytes, start: int, length: int) -> bytes:
    return data[:start] + random.randbytes(length) + data[start:]


def _remove(_random: Random, data: bytes, start: int, length: int) -> bytes:
    return data[:start] + data[start + length :]


def _repeat(random: Random, data: bytes, start: int, length: int) -> bytes:
    times = random.choice((2, 3, 50))
    return data[:start] + data[start : start + length] * times + data[start + length :]


def _cut(_random: Random, data: bytes, start: int, _length: int) -> bytes:
    return data[:start]


def _swap(random: Random, data: bytes, start: int, length: int) -> bytes:
    other = random.randrange(len(data) + 1)
    first, second = sorted((start, other))
    length = min(length, second - first)
    moved, gap = data[first : first + length], data[first + length : second]
    there = data[second : second + length]
    return data[:first] + there + gap + moved + data[second + length :]


_CHANGES = (
    ("flip a bit", _flip),
    ("set a byte", _set),
    ("set a number", _number),
    ("noise", _noise),
    ("insert noise", _insert),
    ("remove", _remove),
    ("repeat", _repeat),
    ("cut", _cut),
    ("swap", _swap),
)
