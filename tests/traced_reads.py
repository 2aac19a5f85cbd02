"""Record the parts of its arguments that a function reads.

The result is the same for all arguments that agree in these parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

# The place of a value in a sequence of arguments, and what was read there.
Place = tuple[int | str, ...]
Reads = dict[Place, str]
WHOLE = "=="


def traced(value: Any, place: Place, reads: Reads) -> Any:
    """Return the value. Every field of a dataclass that is read is recorded in ``reads``."""
    reads[place] = seen(value)
    if is_dataclass(value):
        kind = _traced_type(type(value))
        made = object.__new__(kind)
        made.__dict__.update(value.__dict__, _traced=(value, place, reads))
        return made
    if _holds_dataclasses(value):
        return tuple(traced(item, (*place, i), reads) for i, item in enumerate(value))
    return value


def agree(reads: Mapping[Place, str], arguments: Sequence[Any]) -> bool:
    """Return whether these arguments have the same values in all recorded places."""
    return all(_at(arguments, place) == wanted for place, wanted in reads.items())


def seen(value: Any) -> str:
    """Return what a read reveals: the value, or the type of a dataclass.

    The fields of a dataclass are read later.
    """
    if is_dataclass(value):
        return type(value).__qualname__
    return f"{len(value)} dataclasses" if _holds_dataclasses(value) else repr(value)


def _at(arguments: Sequence[Any], place: Place) -> str | None:
    value: Any = arguments
    for step in place:
        if step == WHOLE:
            return repr(value)
        if isinstance(step, int):
            value = value[step] if step < len(value) else None
        else:
            value = getattr(value, step, None)
    return seen(value)


def _holds_dataclasses(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(is_dataclass(v) for v in value)


@cache
def _traced_type(kind: type) -> type:
    names = frozenset(field.name for field in fields(kind))

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in names:
            return value
        _, place, reads = object.__getattribute__(self, "_traced")
        return traced(value, (*place, name), reads)

    def whole(self: Any) -> Any:
        value, place, reads = object.__getattribute__(self, "_traced")
        reads[(*place, WHOLE)] = repr(value)
        return value

    def equal(self: Any, other: Any) -> bool:
        return bool(whole(self) == (whole(other) if hasattr(other, "_traced") else other))

    members = {
        "__getattribute__": read,
        "__eq__": equal,
        "__hash__": lambda self: hash(whole(self)),
        "__repr__": lambda self: repr(whole(self)),
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)
