"""Frozen dataclasses from JSON and back: every field checked, unknown keys refused."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any, TypeVar

from specbuild.runtime.errors import SpecbuildError

Record = TypeVar("Record")


def to_json(record: Any) -> Any:
    """Plain JSON types of a dataclass, in field order; tuples become lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, (tuple, list)):
        return [to_json(item) for item in record]
    if isinstance(record, dict):
        return {key: to_json(value) for key, value in record.items()}
    return record


def from_json(kind: type[Record], data: Any, where: str) -> Record:
    """A ``kind`` from decoded JSON; SpecbuildError names the place, what was got and expected."""
    result: Record = _decode(kind, data, where)
    return result


def _decode(kind: Any, data: Any, where: str) -> Any:  # noqa: PLR0911 - a case per kind
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), data, where)
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
        return data
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return _finite(data, where)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise _refusal(where, data, kind.__name__)
    return data


def _finite(data: float, where: str) -> float:
    try:
        number = float(data)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(where, data, "a finite number")
    return number


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_record(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _refusal(where, data, "an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise SpecbuildError(f"{where}: unknown keys {', '.join(map(_name, unknown))}")
    hints = _field_types(kind)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecbuildError(f"{where}: key {name!r} is missing")
    return kind(**values)


def _name(key: str) -> str:
    """A key as a message may hold it: on one line."""
    return key if key.isprintable() else repr(key)


def _refusal(where: str, data: Any, expected: str) -> SpecbuildError:
    shown = repr(data)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return SpecbuildError(f"{where}: got {shown}, expected {expected}")
