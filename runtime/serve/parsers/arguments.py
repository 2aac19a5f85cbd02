"""Arguments of tool calls: JSON objects, and single values that a model writes as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]]

# Schemas with deeper references are treated as unrestricted.
_MAX_DEPTH = 16
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
# Some templates show these values in Python's notation, and models follow them.
_PYTHON_VALUES = {"True": True, "False": False, "None": None}


class UnclosedTextError(Exception):
    """The body of a call ends within a string, so the next marker may be part of that string."""


def json_value(text: str) -> Any:
    """Return the value of a JSON text. ValueError if it is invalid or has NaN or Infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid.

    UnclosedTextError if the text ends within a string.
    """
    try:
        return json_value(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnclosedTextError from error
        return None
    except ValueError:
        return None


def json_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text as :func:`parsed_json` does; None if it is not an object."""
    value = parsed_json(text)
    return value if isinstance(value, dict) else None


def parameters_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """Return the schema of a function's parameters; empty if no tool has this name."""
    functions = (tool.get("function", {}) for tool in tools)
    schema = next((f.get("parameters") for f in functions if f.get("name") == name), None)
    return schema if isinstance(schema, Mapping) else {}


def properties_of(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties of a parameter schema, which may be a reference."""
    properties = resolved(root, root).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema to which local references lead; empty if there is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _schema_at(reference, root)
    return {}


def variants_of(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of ``anyOf`` and ``oneOf``."""
    for key in ("anyOf", "oneOf"):
        variants = schema.get(key)
        if isinstance(variants, list):
            yield from variants


def json_types(
    schema: Any,
    root: Mapping[str, Any],
    depth: int = 0,
    types_by_id: dict[int, frozenset[str] | None] | None = None,
) -> frozenset[str] | None:
    """Return the JSON types that a schema allows; None if it does not restrict them.

    ``types_by_id`` has the types of schemas that were visited, by identity. Each is visited once,
    because schemas that refer to each other have exponentially many paths.
    """
    schema = resolved(schema, root)
    types_by_id = {} if types_by_id is None else types_by_id
    if depth > _MAX_DEPTH or not schema:
        return None
    if id(schema) not in types_by_id:
        # A recursive reference restricts nothing.
        types_by_id[id(schema)] = None
        types_by_id[id(schema)] = _json_types(schema, root, depth, types_by_id)
    return types_by_id[id(schema)]


def _json_types(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    depth: int,
    types_by_id: dict[int, frozenset[str] | None],
) -> frozenset[str] | None:
    limits: list[frozenset[str] | None] = []
    type_ = schema.get("type")
    if isinstance(type_, str):
        limits.append(frozenset([type_]))
    elif isinstance(type_, list):
        limits.append(frozenset(k for k in type_ if isinstance(k, str)))
    if isinstance(schema.get("enum"), list):
        limits.append(frozenset(map(type_of, schema["enum"])))
    if "const" in schema:
        limits.append(frozenset([type_of(schema["const"])]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types_of_variants = [
                json_types(variant, root, depth + 1, types_by_id) for variant in schema[key]
            ]
            typed = [types for types in types_of_variants if types is not None]
            limits.append(
                frozenset().union(*typed) if len(typed) == len(types_of_variants) else None
            )
    if isinstance(schema.get("allOf"), list):
        limits += [json_types(part, root, depth + 1, types_by_id) for part in schema["allOf"]]
    typed = [types for types in limits if types is not None]
    return frozenset.intersection(*typed) if typed else None


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of a text that a model wrote, with a type that the schema allows.

    If the schema allows only strings, return the text. If it allows strings and other types, return
    a value of another type if the text can be parsed as one. If it does not restrict the type,
    return the value of the JSON text, or the text if it is not JSON.
    """
    types = json_types(schema, root)
    choices = resolved(schema, root).get("enum")
    if types == frozenset({"string"}) or (isinstance(choices, list) and text in choices):
        return text
    try:
        value = json_value(text)
    except ValueError:
        literal = text.strip()
        if types is None or "string" in types or literal not in _PYTHON_VALUES:
            return text
        value = _PYTHON_VALUES[literal]
        return value if type_of(value) in types else text
    if types is not None and "string" in types:
        return value if _has_type(value, types - {"string"}) else text
    return value


def type_of(value: Any) -> str:
    """Return the name of a JSON value's type."""
    return next((name for type_, name in _TYPES if isinstance(value, type_)), "null")


def _has_type(value: Any, types: frozenset[str]) -> bool:
    type_ = type_of(value)
    return type_ in types or (type_ == "integer" and "number" in types)


def _schema_at(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema at a JSON pointer such as ``#/$defs/Place``."""
    start, *keys = reference.split("/")
    value: Any = root if start == "#" else None
    for escaped in keys:
        key = escaped.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
