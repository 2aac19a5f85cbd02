"""Converts frozen dataclasses to JSON and back: all fields are checked, unknown keys refused.

A union of dataclasses is tagged: each has a ``kind``, a Literal of one string. A class that defines
a dictionary ``MEMBERS`` is a union of the dataclasses in it, by tag. A field with ``VALUES`` in its
metadata accepts only these strings. ``KEY`` and ``FORMER_KEY`` are other names of a field in JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, TypeVar

from specbuild.runtime.errors import SpecbuildError

Record = TypeVar("Record")

VALUES = "values"
# Metadata of a field: its key in JSON if that is not its name, and a key of an earlier version.
KEY, FORMER_KEY = "key", "former key"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# The maximum depth of untyped JSON. Files of this project nest less than half as deep.
_MAX_NESTED = 32


def parsed(data: str | bytes) -> Any:
    """Return decoded JSON; bytes are UTF-8.

    Raises ValueError for invalid JSON, NaN, Infinity, a number beyond 64 bits, half a surrogate
    pair, a duplicate key, or nesting too deep for the interpreter.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        decoded = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_bounded_int,
            parse_float=_bounded_float,
        )
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    if _SURROGATE.search(text):
        _require_text(decoded)
    return decoded


def to_json(
    record: Any, leave_out: Callable[[dataclasses.Field[Any], Any], bool] | None = None
) -> Any:
    """Return the plain JSON types of a dataclass, in field order; tuples become lists.

    Fields for which ``leave_out(field, value)`` is true are omitted.
    """
    fields = _fields_by_key(record.__class__)
    if fields is not None:
        values = [(key, field, getattr(record, field.name)) for key, field in fields.items()]
        return {
            key: to_json(value, leave_out)
            for key, field, value in values
            if leave_out is None or not leave_out(field, value)
        }
    if isinstance(record, (tuple, list)):
        return [to_json(item, leave_out) for item in record]
    if isinstance(record, dict):
        return {key: to_json(value, leave_out) for key, value in record.items()}
    return record


@cache
def _fields_by_key(kind: type) -> dict[str, dataclasses.Field[Any]] | None:
    """Return the fields of a dataclass by their keys in JSON; None for other types."""
    if not dataclasses.is_dataclass(kind):
        return None
    return {field.metadata.get(KEY, field.name): field for field in dataclasses.fields(kind)}


def from_json(kind: type[Record], data: Any, where: str) -> Record:
    """Return a ``kind`` from decoded JSON; SpecbuildError states the place, actual and expected."""
    result: Record = _decode(kind, data, where)
    return result


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _bounded_int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"a number of {len(digits)} digits is beyond 64 bits")
    return int(digits)


def _bounded_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number is beyond what 64 bits hold")
    return number


def _require_text(decoded: Any) -> None:
    """Raise ValueError if a string of decoded JSON has half a surrogate pair."""
    try:
        json.dumps(decoded, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a string holds half a surrogate pair") from error
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def _plain(data: Any, where: str, nested: int = 0) -> Any:
    """Return ``data`` unchanged; SpecbuildError if it nests too deep to be written again."""
    if nested > _MAX_NESTED:
        raise SpecbuildError(f"{where} nests deeper than {_MAX_NESTED} levels")
    if isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            _plain(item, where, nested + 1)
    return data


def _decode(kind: Any, data: Any, where: str) -> Any:  # noqa: PLR0911 - a case per kind
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        kinds = [a for a in arguments if a is not type(None)]
        return _decode(kinds[0] if len(kinds) == 1 else _tagged(kinds, data, where), data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise _refusal(where, data, f"one of {', '.join(map(repr, arguments))}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise _refusal(where, data, "a list")
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise _refusal(where, data, "an object")
        return {
            key: _decode(arguments[1], item, f"{where}.{_name(key)}") for key, item in data.items()
        }
    if kind is Any:
        return _plain(data, where)
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return _finite(data, where)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise _refusal(where, data, kind.__name__)
    return data


def _tagged(kinds: list[Any], data: Any, where: str) -> Any:
    """Return the member of a union of dataclasses that ``data`` is, by its ``kind``."""
    tags = {typing.get_args(field_types(kind)["kind"])[0]: kind for kind in kinds}
    return _member(tags, data, where)


def open_union(kind: Any) -> Mapping[str, Any] | None:
    """Return the members of a class with ``MEMBERS``, by tag; None for other types."""
    members: Mapping[str, Any] | None = (
        vars(kind).get("MEMBERS") if isinstance(kind, type) else None
    )
    return members


def _member(tags: Mapping[str, Any], data: Any, where: str) -> Any:
    """Return the dataclass with the tag of ``data``."""
    if not isinstance(data, dict):
        raise _refusal(where, data, "an object")
    if "kind" not in data:
        raise SpecbuildError(f"{where}: key 'kind' is missing")
    tag = data["kind"]
    if not isinstance(tag, str) or tag not in tags:
        raise _refusal(f"{where}.kind", tag, f"one of {', '.join(map(repr, tags))}")
    return tags[tag]


def _finite(data: float, where: str) -> float:
    try:
        number = float(data)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(where, data, "a finite number")
    return number


@cache
def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    return typing.get_type_hints(kind)


def _decode_record(kind: Any, data: Any, where: str) -> Any:
    members = open_union(kind)
    if members is not None:
        kind = _member(members, data, where)
    if not isinstance(data, dict):
        raise _refusal(where, data, "an object")
    fields = _fields_by_key(kind)
    assert fields is not None, kind
    former = {
        field.metadata[FORMER_KEY]: key
        for key, field in fields.items()
        if FORMER_KEY in field.metadata
    }
    if former:
        data = {former.get(key, key): value for key, value in data.items()}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise SpecbuildError(f"{where}: unknown keys {', '.join(map(_name, unknown))}")
    hints = field_types(kind)
    values = {}
    for key, field in fields.items():
        if key in data:
            value = _decode(hints[field.name], data[key], f"{where}.{key}")
            _require_among(field.metadata.get(VALUES), value, f"{where}.{key}")
            values[field.name] = value
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecbuildError(f"{where}: key {key!r} is missing")
    return kind(**values)


def _require_among(allowed: Collection[str] | None, value: Any, where: str) -> None:
    """Raise SpecbuildError if a string, or one of several, is not allowed."""
    for item in value if isinstance(value, tuple) else (value,):
        if allowed is not None and item is not None and item not in allowed:
            raise _refusal(where, item, f"one of {', '.join(map(repr, allowed))}")


def _name(key: str) -> str:
    """Return a key on one line, for a message."""
    return key if key.isprintable() else repr(key)


def brief(data: Any) -> str:
    """Return decoded JSON for a message: short, on one line, at any nesting depth."""
    text = _SHORT.repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refusal(where: str, data: Any, expected: str) -> SpecbuildError:
    return SpecbuildError(f"{where}: got {brief(data)}, expected {expected}")
