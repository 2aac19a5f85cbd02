"""Changes of a graph that leave it a protobuf message of ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

_NUMBERS = (0, 1, -1, 2, 3, 7, 16, 17, 2**20, 2**31 - 1, -(2**31))
_WIDE = (*_NUMBERS, 2**31, 2**40, 2**63 - 1, -(2**63))
_REALS = (0.0, 1.0, -1.0, 1e30, 1e-30, float("nan"), float("inf"))
_WORDS = ("", "x", "../x", "/etc/passwd", "weights.safetensors", "x" * 1000)


def mutated_graph(random: Random, data: bytes) -> tuple[bytes, str]:
    """The graph with one field changed, and the path to it."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    places = [
        (message, field, path)
        for message, path in _messages(model, "")
        for field, _ in message.ListFields()
    ]
    for _ in range(20):
        message, field, path = random.choice(places)
        _change(random, message, field, places)
        changed = model.SerializeToString(deterministic=True)
        if changed != data:
            return changed, f"{path}.{field.name}".lstrip(".")
    return data + b"\0", "a byte at the end"


def _messages(message: Any, path: str) -> Iterator[tuple[Any, str]]:
    yield message, path
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if hasattr(value, "extend") else (value,):
                yield from _messages(item, f"{path}.{field.name}")


def _change(random: Random, message: Any, field: Any, places: list[Any]) -> None:
    value = getattr(message, field.name)
    if hasattr(value, "extend"):
        _change_list(random, value, field, places)
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _other(random, value, field, places))


def _change_list(random: Random, values: Any, field: Any, places: list[Any]) -> None:
    index = random.randrange(len(values))
    way = random.randrange(4)
    if way == 0:
        del values[index]
    elif way == 1:
        values.append(values[index])
    elif way == 2:
        order = list(values)
        random.shuffle(order)
        del values[:]
        values.extend(order)
    elif field.message_type is None:
        values[index] = _other(random, values[index], field, places)
    else:
        values[index].CopyFrom(random.choice(list(values)))


def _other(random: Random, value: Any, field: Any, places: list[Any]) -> Any:
    """Another value of the same type: an edge, a neighbour, or one that stands elsewhere."""
    if isinstance(value, str):
        strings = [getattr(m, f.name) for m, f, _ in places if isinstance(getattr(m, f.name), str)]
        return random.choice((*_WORDS, *random.choices(strings, k=12)))
    if isinstance(value, bytes):
        cut = random.randrange(len(value) + 1)
        return random.choice((value[:cut], value + b"\0", random.randbytes(len(value)), b""))
    if isinstance(value, float):
        return random.choice((*_REALS, value * 2, -value))
    if field.enum_type is not None:
        return random.choice(field.enum_type.values).number
    narrow = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32)
    numbers = _NUMBERS if narrow else _WIDE
    near = [n for n in (value + 1, value - 1, value * 2) if abs(n) < 2**31]
    return random.choice((*numbers, *near))
