"""Every numeric field of JSON files, and values that a hostile file may have there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Place = tuple[str | int, ...]

# As they stand in the file: Python's reader takes all of them.
HOSTILE = (
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "-1",
    "0",
    "0.5",
    "1e-300",
    "4096",
    "2147483647",
    "9223372036854775808",
    "1e30",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "true",
    "null",
    '"x"',
    "[]",
    "[7, -7]",
    "[null]",
    "[[]]",
    "[true]",
    "[1e30]",
    "{}",
    '{"a": null}',
    '"\\ud800"',
)
_MARK = "a value to be replaced"


def numeric_places(data: Any, within: Place = ()) -> list[Place]:
    """Return the places of numbers in decoded JSON, without booleans."""
    if isinstance(data, dict):
        items = list(data.items())
    elif isinstance(data, list):
        items = list(enumerate(data))
    else:
        is_number = isinstance(data, int | float) and not isinstance(data, bool)
        return [within] if is_number else []
    return [place for key, value in items for place in numeric_places(value, (*within, key))]


def with_literal(data: Any, place: Place, literal: str) -> str:
    """Return the JSON text of ``data`` with ``literal`` as the value at ``place``."""
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in place[:-1]:
        if isinstance(inner, dict) and not isinstance(inner.get(key), dict | list):
            inner[key] = {}  # a section that the file does not have
        inner = inner[key]
    inner[place[-1]] = _MARK
    return json.dumps(copy).replace(json.dumps(_MARK), literal)


def written(file: Path, place: Place, literal: str) -> bytes:
    """Write ``literal`` at ``place`` of a JSON file; return the previous bytes."""
    before = file.read_bytes()
    file.write_text(with_literal(json.loads(before), place, literal), encoding="utf-8")
    return before
