"""Guides that are made to exhaust a stack, a processor or memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Field = tuple[str, Any]
_SIZES = (1, 7, 40, 200, 260, 900)
_ATOMS = (
    "a",
    "[a-z]",
    ".",
    r"\\d",
    r"\\p{L}",
    "(a|ab|abc)",
    "(?i:straße)",
    "名",
    "\U0001f600",
    "[^\\x00]",
    "é",
)
_REPEATS = ("*", "+", "?", "{3}", "{2,40}", "{900}", "{0,30000}", "{99999999999}")


def hostile_guide(random: Random) -> tuple[Field, str]:
    """A field of a request that asks for a guide, and what is special about it."""
    make = random.choice(_MAKERS)
    return make(random, random.choice(_SIZES)), make.__name__.strip("_")


def _chained_references(random: Random, size: int) -> Field:
    union = random.choice(("allOf", "anyOf", "oneOf", "items", "properties", "$ref"))
    defs: dict[str, Any] = {}
    for i in range(size):
        other = i + 1 if random.random() < 0.99 else random.randrange(size)
        target = {"$ref": f"#/$defs/a{other}"}
        value: Any = target
        if union.endswith("Of"):
            value = [target]
        elif union == "properties":
            value = {"x": target}
        defs[f"a{i}"] = target if union == "$ref" else {union: value}
    return "guided_json", {"$defs": defs | {f"a{size}": {}}, "$ref": "#/$defs/a0"}


def _doubled_references(random: Random, size: int) -> Field:
    size = min(size, 40)
    defs: dict[str, Any] = {
        f"a{i}": {
            "type": "array", "minItems": 2, "maxItems": random.choice((2, 9**9)),
            "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 2,
        }
        for i in range(size)
    }  # fmt: skip
    return "guided_json", {"$defs": defs | {f"a{size}": {"const": "ab"}}, "$ref": "#/$defs/a0"}


def _nested_schema(random: Random, size: int) -> Field:
    begin, end = random.choice((
        ('{"items":', "}"), ('{"anyOf":[{"type":"null"},', "]}"), ('{"not":', "}"),
        ('{"patternProperties":{"^a":', "}}"), ('{"const":[', "]}"), ('{"enum":[', "]}"),
        ('{"required":["a"],"properties":{"a":', "}}"),
    ))  # fmt: skip
    return "guided_json", begin * size + "{}" + end * size


def _patterns(random: Random, size: int) -> Field:
    pattern = _regex(random, min(size, 60))
    schema: dict[str, Any] = random.choice((
        {"type": "string", "pattern": pattern, "minLength": size},
        {"type": "object", "patternProperties": {f"{pattern}{i}": {} for i in range(size % 50)}},
        {"type": "object", "propertyNames": {"pattern": pattern}, "minProperties": size},
        {"type": "array", "items": {"pattern": pattern}, "minItems": size * 1000},
        {"allOf": [{"type": "string", "pattern": f"{pattern}{i}"} for i in range(size % 20)]},
        {"type": "integer", "multipleOf": size + 1, "minimum": -(10**18), "maximum": 10**18},
    ))  # fmt: skip
    return "guided_json", schema


def _regex(random: Random, size: int) -> str:
    text = random.choice(_ATOMS)
    for _ in range(size):
        way = random.randrange(4)
        other = random.choice(_ATOMS)
        if way == 0:
            text = f"({text}){random.choice(_REPEATS)}"
        elif way == 1:
            text = f"({text}|{other})"
        else:
            text += other
    return text


def _regular_expression(random: Random, size: int) -> Field:
    return "guided_regex", _regex(random, min(size, 60))


def _choices(random: Random, size: int) -> Field:
    count = random.choice((1, 2, size))
    word = "ab" * (random.choice((1, 20, 20_000)) if count < 3 else 20)
    return "guided_choice", [f"{word}{i}" for i in range(count)]


def _rules(random: Random, size: int) -> Field:
    """Rules of Lark that refer to each other in any way."""
    size = min(size, 300)
    upper = random.random() < 0.3
    name = "R" if upper else "r"
    lines = ["start: " + f"{name}0"]
    for i in range(size):
        parts = []
        for _ in range(random.choice((1, 2, 2, 3))):
            other = i + 1 if random.random() < 0.8 else random.randrange(size)
            part = random.choice((f"{name}{other}", json.dumps("ab" * random.choice((1, 9)))))
            parts.append(part + random.choice(("", "", "", "?", "*", "{3}", "{100}")))
        joint = random.choice((" ", " ", " | ", " & " if upper else " "))
        lines.append(f"{name}{i}: {joint.join(parts)}")
    lines.append(f'{name}{size}: "x" | /{_regex(random, 4).replace("/", "")}/')
    return "guided_grammar", "\n".join(lines)


def _gbnf(random: Random, size: int) -> Field:
    """Rules of llama.cpp, which are converted first."""
    lines = ["root ::= b0"]
    for i in range(size):
        rest = random.choice(("", "*", "b0", "[a-z]+"))
        lines.append(f'b{i} ::= b{i + 1} | "x" {rest}')
    return "guided_grammar", "\n".join([*lines, f'b{size} ::= "y"'])


def _odd_lark(random: Random, size: int) -> Field:
    word = "ab" * size
    text = random.choice((
        f'start: %json {{"const": "{word}"}}', f'start: A\nA: /(a{{{size}}})+/ & /(aa)+/',
        f'start: x\nx[suffix="{word}"]: /(.|\\n)*/', f'start: "a"~{size}..{size * 9}',
        "start: " + "(" * size + '"a"' + ")" * size, 'start: start "a" | "b"', "start: start",
        f'start: %regex {{"substring_chars": "{word}"}}', 'start: r::0\nr::_: "a" r::incr(_)',
        'start: <[0-9999999]>', '%ignore /a*/\nstart:' + ' "a"' * size,
        'start: @missing', '%llguidance {"no_forcing": true}\nstart: "ab" start?',
    ))  # fmt: skip
    return "guided_grammar", text


_MAKERS: tuple[Callable[[Random, int], Field], ...] = (
    _chained_references, _doubled_references, _nested_schema, _patterns, _regular_expression,
    _choices, _rules, _gbnf, _odd_lark,
)  # fmt: skip
