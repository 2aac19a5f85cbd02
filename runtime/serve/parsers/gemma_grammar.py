"""Grammars of Gemma 4's tool calls: arguments of a schema, strings between ``<|"|>``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specbuild.runtime.guides.guide import MAX_GUIDE_BYTES, Guide
from specbuild.runtime.serve.parsers.arguments import json_types, resolved, variants_of
from specbuild.runtime.serve.parsers.gemma_arguments import STRING

Quote = Callable[[str], str]

# Keywords that the grammar leaves out.
_UNENFORCED = (
    "pattern", "format", "minLength", "maxLength", "uniqueItems", "minProperties",
    "maxProperties", "prefixItems", "contains", "patternProperties",
)  # fmt: skip
# Longer lists of a schema have no limit.
_MAX_ITEMS = 64
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NUMBERS = ("integer", "number")
_SCALARS = {
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}


class GemmaGrammar:
    """Rules of the values of a call's arguments, whose names start with ``prefix``.

    ``marker`` and ``text`` quote a marker and a literal text.
    """

    def __init__(self, prefix: str, arguments: Guide, marker: Quote, text: Quote) -> None:
        self._prefix, self._arguments, self._text = prefix, arguments, text
        self._root: Mapping[str, Any] = json.loads(arguments.source)
        self._quote = quote = marker(STRING)
        is_token = quote != text(STRING)
        string = f"{prefix}_string: TEXT {quote}" if is_token else self._suffixed(quote)
        self._rules, self._size = [string], 0
        # By the identity of a schema, which may refer to itself.
        self._names: dict[int, str] = {}
        self._guides: dict[str, Guide] = {}

    def call(self, name: str) -> tuple[str, tuple[str, ...], dict[str, Guide]]:
        """Return the expression of a call's body, its rules, and the guides of numbers.

        RequestError if a strict schema has keywords that the grammar leaves out.
        """
        values = self._object(resolved(self._root, self._root))
        return f"{self._text(f'call:{name}')} {values}", tuple(self._rules), self._guides

    def _suffixed(self, quote: str) -> str:
        return f"{self._prefix}_string[suffix={quote}]: TEXT"

    def _value(self, given: Any) -> str:
        """Return the name of the rule of a schema's values."""
        schema = resolved(given, self._root)
        if id(schema) in self._names:
            return self._names[id(schema)]
        name = f"{self._prefix}_v{len(self._names)}"
        self._names[id(schema)] = name
        self._add(name, " | ".join(self._alternatives(schema)) or self._any())
        return name

    def _alternatives(self, schema: Mapping[str, Any]) -> list[str]:
        variants = list(variants_of(schema))
        if variants:
            return [self._value(variant) for variant in variants]
        literals = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(literals, list):
            return [self._literal(value) for value in literals]
        types = json_types(schema, self._root)
        if types is None:
            return []
        self._require_enforced(schema)
        made = {
            **_SCALARS,
            "string": f"{self._quote} {self._prefix}_string",
            **{kind: self._number(schema, kind) for kind in types & set(_NUMBERS)},
            "array": self._array(schema) if "array" in types else "",
            "object": self._object(schema) if "object" in types else "",
        }
        return [made[kind] for kind in sorted(types) if kind in made]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {self._text(value)} {self._quote}"
        return self._text(json.dumps(value))

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not 0 <= least <= _MAX_ITEMS:
            least = 0
        if not isinstance(most, int) or not least <= most <= _MAX_ITEMS:
            more = f'("," {item})*'
        else:
            more = ""
            for _ in range(max(least, 1), most):
                more = f'("," {item} {more})?'
            if most == 0:
                return '"[" "]"'
        listed = " ".join([item, *[f'"," {item}'] * (least - 1), more])
        return f'"[" {listed} "]"' if least else f'"[" ({listed})? "]"'

    def _number(self, schema: Mapping[str, Any], kind: str) -> str:
        """Return a number within the limits of the schema: it is written as in JSON."""
        name = f"{self._prefix}_n{len(self._guides)}"
        limits = {key: value for key, value in schema.items() if key in _LIMITS}
        self._guides[name] = Guide.json(
            {"type": kind, **limits}, lenient=self._arguments.lenient, name=self._arguments.name
        )
        return f"@{name}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return an object whose members follow the order of the schema."""
        self._require_enforced(schema)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            closed = schema.get("additionalProperties") is False
            return '"{" "}"' if closed else self._any_object()
        asked = schema.get("required")
        required = asked if isinstance(asked, list) else []
        members = [
            f"{self._text(f'{key}:')} {self._value(value)}" for key, value in properties.items()
        ]
        firsts, can_be_empty = [], True
        for place, key in enumerate(properties):
            rest = [
                f'"," {member}' if other in required else f'("," {member})?'
                for other, member in list(zip(properties, members, strict=True))[place + 1 :]
            ]
            firsts.append(" ".join([members[place], *rest]))
            if key in required:
                can_be_empty = False
                break
        return f'"{{" ({" | ".join(firsts)}){"?" if can_be_empty else ""} "}}"'

    def _any(self) -> str:
        """Return any value."""
        name = f"{self._prefix}_any"
        if name not in self._names.values():
            self._names[-1] = name
            scalars = " | ".join((_SCALARS["number"], _SCALARS["boolean"], _SCALARS["null"]))
            string = f"{self._quote} {self._prefix}_string"
            listed = f'"[" ({name} ("," {name})*)? "]"'
            self._add(name, f"{string} | {scalars} | {listed} | {self._any_object()}")
        return name

    def _any_object(self) -> str:
        member = f'NAME ":" {self._any()}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _add(self, name: str, body: str) -> None:
        self._size += len(body)
        if self._size > MAX_GUIDE_BYTES:
            raise self._arguments.error(
                f"takes more than {MAX_GUIDE_BYTES} bytes as a grammar of its arguments"
            )
        self._rules.append(f"{name}: {body}")

    def _require_enforced(self, schema: Mapping[str, Any]) -> None:
        unenforced = [key for key in _UNENFORCED if key in schema]
        if unenforced and not self._arguments.lenient:
            raise self._arguments.error(
                f"has {unenforced[0]!r}, which this model's call format cannot enforce; leave it "
                "out, or leave out strict"
            )
