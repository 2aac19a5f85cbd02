"""Limits of a Lark grammar: the depth of its rules and the length of forced text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from specbuild.runtime.guides.regex_limits import (
    CHARACTER_BYTES,
    MAX_DEPTH,
    MAX_NESTING,
    TooDeepError,
    min_repetitions,
    regex_length,
)
from specbuild.runtime.guides.schema_limits import SchemaLimits

# Maximum number of passes over the rules. Passes are repeated until no length changes.
_MAX_PASSES = 20
# The tokens of llguidance's Lark.
_LARK = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t\r]+)
    |(?P<newline>\n)
    |(?P<json>%(?:json|regex|llguidance)\b)
    |(?P<string>"(?:\\.|[^"\\])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<name>[!?_]*[A-Za-z][A-Za-z0-9_\-]*)
    |(?P<special><[^<>\s]+>)
    |(?P<grammar>@[A-Za-z0-9_\-]+)
    |(?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<number>[+-]?\d+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
# A part of a rule: the number of bytes of a text, the name of a rule, a sequence, alternatives, or
# a part with its minimum number of repetitions.
_Part = tuple[str, Any] | tuple[str, Any, float]


class LarkLimits:
    """A Lark grammar: the depth of its rules, and the length of the text that it forces.

    ``grammars`` has the lengths, by name, of other grammars to which this one may refer.
    """

    def __init__(self, text: str, grammars: Mapping[str, float] | None = None) -> None:
        self._grammar_lengths = grammars or {}
        self._rules: dict[str, _Part] = {}
        self._schemas: list[SchemaLimits] = []
        self._shortest_by_rule: dict[str, float] = {}
        self._depth: dict[str, int] = {}
        self._rule_order: list[str] = []
        # The lengths of rules give no bound for intersections, complements and backtracking.
        self._unbounded = False
        self.has_parameters = False
        self._tokens = list(self._scan(text))
        self._position = self._nesting = 0
        self._read_rules()

    def check_depth(self) -> None:
        """Raise TooDeepError if a chain of rules or schemas is too long."""
        for name in self._rules:
            self._depth_of(name, 0)
        for schema in self._schemas:
            schema.check_depth()

    def longest(self) -> float:
        """Return an upper bound of the bytes that the grammar can force at once."""
        self.check_depth()
        for _ in range(_MAX_PASSES):
            before = dict(self._shortest_by_rule)
            # A rule comes after the rules to which it refers, unless the rules are recursive.
            for name in self._rule_order:
                self._shortest_by_rule[name] = self._shortest(self._rules[name])
            if self._shortest_by_rule == before:
                lengths = self._shortest_by_rule.values()
                return inf if self._unbounded else max(lengths, default=0)
        return inf

    def _scan(self, text: str) -> Iterator[tuple[str, Any]]:
        position = 0
        while position < len(text):
            match = _LARK.match(text, position)
            assert match is not None and match.lastgroup is not None
            kind, value, position = match.lastgroup, match.group(), match.end()
            if kind == "json":
                try:
                    blank = len(text[position:]) - len(text[position:].lstrip())
                    json_content, position = json.JSONDecoder().raw_decode(text, position + blank)
                except ValueError:
                    continue
                yield value, json_content
            elif kind != "skip":
                yield kind, value

    def _read_rules(self) -> None:
        tokens = self._tokens
        self.has_parameters = any(
            tokens[i] == tokens[i + 1] == ("other", ":") for i in range(len(tokens) - 1)
        )
        self._unbounded = any(token in (("other", "&"), ("other", "~")) for token in tokens)
        starts = [i for i, token in enumerate(tokens) if token == ("other", ":")]
        name = None
        for i in starts:
            begin = i - 1
            while begin > 0 and tokens[begin][0] != "newline":
                begin -= 1
            header = [value for kind, value in tokens[begin : i + 1] if kind == "name"]
            name = header[0].lstrip("!?_") if header else None
            self._position = i + 1
            body = self._alternatives()
            if name is not None:
                self._rules[name] = body
        for kind, value in tokens:
            if kind == "%json":
                self._schemas.append(SchemaLimits(value))

    def _alternatives(self) -> _Part:
        options = [self._sequence()]
        while self._peek() == "|":
            self._position += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else ("alt", options)

    def _peek(self) -> str | None:
        """Return the next token of this rule. A line that starts with a bar continues the rule."""
        position = self._position
        while position < len(self._tokens) and self._tokens[position][0] == "newline":
            position += 1
        if position < len(self._tokens) and self._tokens[position] == ("other", "|"):
            self._position = position
        if self._position >= len(self._tokens):
            return None
        kind, value = self._tokens[self._position]
        return value if kind == "other" else kind

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while (kind := self._peek()) not in (None, "|", ")", "]", "newline"):
            value = self._tokens[self._position][1]
            self._position += 1
            match kind:
                case "(" | "[":
                    inner = self._group()
                    parts.append(("rep", inner, 0) if kind == "[" else inner)
                case "string":
                    parts.append(("text", len(value.encode())))
                case "regex":
                    parts.append(("text", regex_length(value.rpartition("/")[0][1:])))
                case "special":
                    parts.append(("text", CHARACTER_BYTES))
                case "name":
                    parts.append(("rule", value.lstrip("!?_")))
                case "grammar":
                    parts.append(("text", self._grammar_lengths.get(value[1:], inf)))
                case "%json":
                    parts.append(("text", SchemaLimits(value).longest()))
                case "%regex":
                    parts.append(("text", 0))
                case "+" | "*" | "?" | "repeat" if parts:
                    parts[-1] = ("rep", parts[-1], min_repetitions(value))
        return ("seq", parts)

    def _group(self) -> _Part:
        """Return the part within brackets, which may span lines."""
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise TooDeepError
        depth, first = 1, self._position
        while self._position < len(self._tokens) and depth:
            kind, value = self._tokens[self._position]
            if kind == "other":
                depth += (value in "([") - (value in ")]")
            self._position += 1
        end, tokens = self._position, self._tokens
        inner = tokens[first : end - 1 if not depth else end]
        self._tokens, self._position = [t for t in inner if t[0] != "newline"], 0
        try:
            return self._alternatives()
        finally:
            self._tokens, self._position = tokens, end
            self._nesting -= 1

    def _depth_of(self, name: str, num_above: int) -> int:
        if num_above > MAX_DEPTH:
            raise TooDeepError
        if name not in self._depth and name in self._rules:
            self._depth[name] = 0
            depths = [self._depth_of(each, num_above + 1) for each in _names(self._rules[name])]
            self._depth[name] = 1 + max(depths, default=0)
            self._rule_order.append(name)
        if num_above + self._depth.get(name, 0) > MAX_DEPTH:
            raise TooDeepError
        return self._depth.get(name, 0)

    def _shortest(self, part: _Part) -> float:
        """Return the bytes of the shortest text; infinite if none is known."""
        match part:
            case ("text", length):
                return float(length)
            case ("rule", name):
                # Imported names are llguidance's own lexemes.
                return (
                    self._shortest_by_rule.get(name, inf)
                    if name in self._rules
                    else CHARACTER_BYTES
                )
            case ("seq", parts):
                return sum(self._shortest(each) for each in parts)
            case ("alt", options):
                return min(self._shortest(each) for each in options)
            case ("rep", inner, times):
                return times * self._shortest(inner) if times else 0
        raise AssertionError(part)


def _names(part: _Part) -> Iterator[str]:
    """Yield the names of the rules to which a part refers."""
    match part:
        case ("rule", name):
            yield name
        case ("seq" | "alt", parts):
            for each in parts:
                yield from _names(each)
        case ("rep", inner, _):
            yield from _names(inner)
