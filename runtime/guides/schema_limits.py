"""Limits of a JSON Schema: the depth of its definitions and the length of forced text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from specbuild.runtime.guides.regex_limits import (
    CHARACTER_BYTES,
    MAX_DEPTH,
    TooDeepError,
    regex_length,
)

_MAPPING_KEYWORDS = ("properties", "patternProperties", "dependentSchemas")
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else")


class SchemaLimits:
    """A JSON Schema: the depth of its definitions, and the length of the text that it forces."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._shortest: dict[int, float] = {}
        self._longest: dict[int, float] = {}
        self._depth: dict[int, int] = {}

    def check_depth(self) -> None:
        """Raise TooDeepError if a chain of definitions is too long."""
        self._depth_of(self._root, 0)

    def longest(self) -> float:
        """Return an upper bound of the bytes that the schema can force at once."""
        return self._longest_of(self._root)

    def _depth_of(self, node: Any, num_above: int) -> int:
        """Return the length of the longest chain of definitions from ``node``."""
        if num_above > MAX_DEPTH:
            raise TooDeepError
        if id(node) not in self._depth:
            self._depth[id(node)] = 0
            depths = [self._depth_of(child, num_above + 1) for child in self._children(node)]
            self._depth[id(node)] = 1 + max(depths, default=0)
        if num_above + self._depth[id(node)] > MAX_DEPTH:
            raise TooDeepError
        return self._depth[id(node)]

    def _longest_of(self, node: Any) -> float:
        """Return the largest sum of shortest lengths along a chain of schemas from ``node``."""
        if id(node) not in self._longest:
            self._longest[id(node)] = 0
            longest_inside = max(
                (self._longest_of(child) for child in self._children(node)), default=0
            )
            self._longest[id(node)] = self._shortest_of(node) + longest_inside
        return self._longest[id(node)]

    def _shortest_of(self, node: Any) -> float:
        """Return an upper bound of the bytes of the shortest text.

        It is infinite if the schema requires itself.
        """
        if not isinstance(node, Mapping):
            return CHARACTER_BYTES
        if id(node) not in self._shortest:
            self._shortest[id(node)] = inf
            self._shortest[id(node)] = self._length(node)
        return self._shortest[id(node)]

    def _length(self, node: Mapping[str, Any]) -> float:
        length: float = 0 if "$ref" in node else 8
        if "$ref" in node:
            target = self._target(node["$ref"])
            length += inf if target is None else self._shortest_of(target)
        if "const" in node or "enum" in node:
            values = node.get("enum", [node.get("const")])
            values = values if isinstance(values, list) else [values]
            length += max((len(json.dumps(value)) for value in values), default=0)
        properties = node.get("properties", {})
        required = node.get("required", ())
        for name in required if isinstance(required, list | tuple) else ():
            value = properties.get(name, {}) if isinstance(properties, Mapping) else {}
            length += len(json.dumps(name)) + 4 + self._shortest_of(value)
        length += self._repeated_length(node, "minProperties", "additionalProperties")
        length += self._repeated_length(node, "minItems", "items")
        prefix = node.get("prefixItems", ())
        if node.get("minItems") and isinstance(prefix, list):
            length += sum(2 + self._shortest_of(item) for item in prefix)
        if isinstance(node.get("pattern"), str):
            length += regex_length(node["pattern"])
        length += CHARACTER_BYTES * _number(node.get("minLength", 0))
        for schema in _list(node.get("allOf")):
            length += self._shortest_of(schema)
        for union in ("anyOf", "oneOf"):
            options = [self._shortest_of(schema) for schema in _list(node.get(union))]
            # Skip recursive options, which are never the shortest ones.
            length += max((o for o in options if o < inf), default=inf if options else 0)
        return length

    def _repeated_length(self, node: Mapping[str, Any], count: str, item: str) -> float:
        times = _number(node.get(count, 0))
        return times * (2 + self._shortest_of(node.get(item, {}))) if times else 0

    def _children(self, node: Any) -> Iterator[Any]:
        """Yield the schemas that ``node`` contains or refers to."""
        if not isinstance(node, Mapping):
            return
        if "$ref" in node:
            target = self._target(node["$ref"])
            if target is not None:
                yield target
        for key in _MAPPING_KEYWORDS:
            if isinstance(node.get(key), Mapping):
                yield from node[key].values()
        for key in _LIST_KEYWORDS:
            yield from _list(node.get(key))
        for key in _SCHEMA_KEYWORDS:
            value = node.get(key)
            yield from value if isinstance(value, list) else [value] if value is not None else []

    def _target(self, reference: Any) -> Any:
        """Return the schema at a JSON pointer; None for other references."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node if reference in ("#", "") or "/" in reference else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else 0
