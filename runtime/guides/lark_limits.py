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

# Maximum number of passes over the rules, until their lengths do not change.
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

    ``grammars`` has the lengths of other grammars, to which it refers.
    """

    def __init__(self, text: str, grammars: Mapping[str, float] | None = None) -> None:
        self._grammars = grammars or {}
        self._rules: dict[str, _Part] = {}
        self._schemas: list[SchemaLimits] = []
        self._known: dict[str, float] = {}
        self._depth: dict[str, int] = {}
        self._order: list[str] = []
        # Intersections, complements and backtracking have no bound that the rules show.
        self._unbounded = False
        self.has_parameters = False
        self._tokens = list(self._scan(text))
        self._at = self._nesting = 0
        self._read_rules()

    def check_depth(self) -> None:
        for name in self._rules:
            self._depth_of(name, 0)
        for schema in self._schemas:
            schema.check_depth()

    def longest(self) -> float:
        """Return an upper bound of the bytes that the grammar can force at once."""
        self.check_depth()
        for _ in range(_MAX_PASSES):
            before = dict(self._known)
            # Rules are ordered after those to which they refer, where such an order exists.
            for name in self._order:
                self._known[name] = self._shortest(self._rules[name])
            if self._known == before:
                lengths = self._known.values()
                return inf if self._unbounded else max(lengths, default=0)
        return inf

    def _scan(self, text: str) -> Iterator[tuple[str, Any]]:
        at = 0
        while at < len(text):
            match = _LARK.match(text, at)
            assert match is not None and match.lastgroup is not None
            kind, value, at = match.lastgroup, match.group(), match.end()
            if kind == "json":
                try:
                    blank = len(text[at:]) - len(text[at:].lstrip())
                    described, at = json.JSONDecoder().raw_decode(text, at + blank)
                except ValueError:
                    continue
                yield value, described
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
            self._at = i + 1
            body = self._alternatives()
            if name is not None:
                self._rules[name] = body
        for kind, value in tokens:
            if kind == "%json":
                self._schemas.append(SchemaLimits(value))

    def _alternatives(self) -> _Part:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else ("alt", options)

    def _peek(self) -> str | None:
        """Return the next token of this rule. A line that starts with a bar continues the rule."""
        at = self._at
        while at < len(self._tokens) and self._tokens[at][0] == "newline":
            at += 1
        if at < len(self._tokens) and self._tokens[at] == ("other", "|"):
            self._at = at
        if self._at >= len(self._tokens):
            return None
        kind, value = self._tokens[self._at]
        return value if kind == "other" else kind

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while (kind := self._peek()) not in (None, "|", ")", "]", "newline"):
            value = self._tokens[self._at][1]
            self._at += 1
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
                    parts.append(("text", self._grammars.get(value[1:], inf)))
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
        depth, first = 1, self._at
        while self._at < len(self._tokens) and depth:
            kind, value = self._tokens[self._at]
            if kind == "other":
                depth += (value in "([") - (value in ")]")
            self._at += 1
        end, tokens = self._at, self._tokens
        inner = tokens[first : end - 1 if not depth else end]
        self._tokens, self._at = [t for t in inner if t[0] != "newline"], 0
        try:
            return self._alternatives()
        finally:
            self._tokens, self._at = tokens, end
            self._nesting -= 1

    def _depth_of(self, name: str, above: int) -> int:
        if above > MAX_DEPTH:
            raise TooDeepError
        if name not in self._depth and name in self._rules:
            self._depth[name] = 0
            depths = [self._depth_of(each, above + 1) for each in _names(self._rules[name])]
            self._depth[name] = 1 + max(depths, default=0)
            self._order.append(name)
        if above + self._depth.get(name, 0) > MAX_DEPTH:
            raise TooDeepError
        return self._depth.get(name, 0)

    def _shortest(self, part: _Part) -> float:
        """Return the bytes of the shortest text; infinite if none is known."""
        match part:
            case ("text", length):
                return float(length)
            case ("rule", name):
                # Imported names are llguidance's own lexemes.
                return self._known.get(name, inf) if name in self._rules else CHARACTER_BYTES
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
