"""Calls whose arguments are written one by one, as text: those of GLM and of Qwen3-Coder.

Texts are written as they are, all else as JSON. So only the function's schema says which it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.guides.guide import MOST_GUIDE_BYTES, Guide
from specbuild.runtime.serve.parsers.arguments import (
    Tools,
    UnclosedTextError,
    json_types,
    parameters_of,
    properties_of,
    resolved,
    typed_value,
    variants_of,
)

Quote = Callable[[str], str]

# What a grammar cannot hold a text to while it looks for the text's end.
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True)
class WrittenArguments:
    """A form of calls with written arguments.

    ``name`` matches the beginning, up to the first argument, with the function's name as its group;
    ``argument`` one argument, with its name and its value; ``opened`` an argument whose value has
    no end; ``nested`` the beginning of another call, which no value holds. ``end`` follows the last
    argument and may be missing.

    The other fields write a call: ``head`` has the function's name in place of ``{}``; marks are
    ``before`` an argument's name, ``between`` name and value, and ``behind`` the value; ``gap`` is
    a pattern of the white space behind the head and behind each argument.
    """

    name: re.Pattern[str]
    argument: re.Pattern[str]
    opened: re.Pattern[str]
    nested: re.Pattern[str]
    end: str
    head: str
    before: tuple[str, ...]
    between: tuple[str, ...]
    behind: str
    gap: str

    def read(self, body: str, tools: Tools) -> tuple[str, str] | None:
        """Return the name and the arguments. UnclosedTextError where a value has no end."""
        head = self.name.match(body)
        if head is None or self.nested.search(body, head.end()):
            return None
        name, place = head[1], head.end()
        root = parameters_of(name, tools)
        schemas = properties_of(root)
        arguments: dict[str, Any] = {}
        while (found := self.argument.match(body, place)) is not None:
            key, value = found[1].strip(), found[2]
            arguments[key] = typed_value(value, schemas.get(key), root)
            place = found.end()
        if self.opened.match(body, place):
            raise UnclosedTextError
        if body[place:].strip() not in ("", self.end):
            return None
        try:
            return name, json.dumps(arguments)
        except RecursionError:
            return None

    def grammar(
        self, prefix: str, name: str, arguments: Guide, mark: Quote, text: Quote
    ) -> tuple[str, tuple[str, ...], dict[str, Guide]]:
        """Return an expression of the call's body, with the rules and guides it refers to.

        Arguments come in the order of the schema. RequestError where it is strict and has keywords
        that a grammar of a text cannot enforce.
        """
        root = json.loads(arguments.source)
        outer = resolved(root, root)
        schemas, required = properties_of(root), outer.get("required")
        required = required if isinstance(required, list) else ()
        size = 0
        parts: dict[str, Guide] = {}
        gap, free = f"{prefix}_gap", f"{prefix}_text"
        rules = [f"{gap}: /{self.gap}/", *self._text_rule(free, mark, text)]

        def argument(key: str, value: str) -> str:
            before = " ".join(map(mark, self.before))
            between = f" {gap} ".join(map(mark, self.between))
            return f"{before} {key} {between} {value} {gap}"

        pairs = []
        for i, (key, schema) in enumerate(schemas.items()):
            values: list[str] = []
            guides: dict[str, Guide] = {}
            for j, choice in enumerate(_choices(schema, root, arguments)):
                if choice is None:
                    values, guides = [free], {}
                    break
                size += len(choice.source if isinstance(choice, Guide) else choice)
                if size > MOST_GUIDE_BYTES:
                    raise arguments.refused(
                        f"takes more than {MOST_GUIDE_BYTES} bytes as a grammar of its arguments"
                    )
                if isinstance(choice, Guide):
                    guides[f"{prefix}_{i}_{j}"] = choice
                    value = f"@{prefix}_{i}_{j}"
                else:
                    value = text(choice)
                values.append(f"{value} {mark(self.behind)}")
            parts |= guides
            rules.append(f"{prefix}_{i}: {argument(text(key), '(' + ' | '.join(values) + ')')}")
            pairs.append(f"{prefix}_{i}" if key in required else f"{prefix}_{i}?")
        if not schemas and outer.get("additionalProperties") is not False:
            rules.append(f"{prefix}_any: {argument('NAME', free)}")
            pairs.append(f"{prefix}_any*")
        tail = text(self.end) if self.end else ""
        body = f"{text(self.head.format(name))} {gap} {' '.join(pairs)} {tail}"
        return body, tuple(rules), parts

    def _text_rule(self, name: str, mark: Quote, text: Quote) -> Iterator[str]:
        """A text with what is behind it: up to a token, or up to the first such text."""
        behind = mark(self.behind)
        if behind == text(self.behind):
            yield f"{name}[suffix={behind}]: TEXT"
        else:
            yield f"{name}: TEXT {behind}"


def _choices(
    schema: Any,
    root: Mapping[str, Any],
    arguments: Guide,
    depth: int = 0,
    seen: set[int] | None = None,
) -> Iterator[str | Guide | None]:
    """Yield what a value may be: a text as it is, JSON of a guide, or any text (None).

    ``seen`` has the identities of schemas whose choices were given before.
    """
    schema, seen = resolved(schema, root), set() if seen is None else seen
    if schema and id(schema) in seen:
        return
    seen.add(id(schema))
    variants = list(variants_of(schema))
    if variants and depth < 4:
        for variant in variants:
            yield from _choices(variant, root, arguments, depth + 1, seen)
        return
    types = json_types(schema, root)
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        yield from (v if isinstance(v, str) else json.dumps(v) for v in listed)
    elif types is None or "string" in types:
        unenforced = [key for key in _TEXT_KEYWORDS if key in schema]
        if unenforced and not arguments.lenient:
            raise arguments.refused(
                f"has {unenforced[0]!r}, which this model's form of calls cannot enforce; leave it "
                "out, or leave out strict"
            )
        yield None
    else:
        shared = {}
        if '"$ref"' in json.dumps(schema):
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        yield Guide.json({**shared, **schema}, lenient=arguments.lenient, name=arguments.name)


GLM = WrittenArguments(
    name=re.compile(r"\s*([^\s<]+)\s*"),
    argument=re.compile(
        r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
    ),
    opened=re.compile(r"<arg_key>[^<]*</arg_key>\s*<arg_value>(?!.*</arg_value>)", re.DOTALL),
    nested=re.compile(r"<tool_call>\s*[\w.\-]+\s*<arg_key>"),
    end="",
    head="{}",
    before=("<arg_key>",),
    between=("</arg_key>", "<arg_value>"),
    behind="</arg_value>",
    gap=r"\n?",
)
QWEN3_CODER = WrittenArguments(
    name=re.compile(r"\s*<function=([^>\s]+)>\s*"),
    argument=re.compile(
        r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>|\Z)", re.DOTALL
    ),
    opened=re.compile(r"<parameter=[^>\n]+>(?!.*</parameter>)", re.DOTALL),
    nested=re.compile(r"<tool_call>\s*<function="),
    end="</function>",
    head="<function={}>",
    before=("<parameter=",),
    between=(">\n",),
    behind="\n</parameter>",
    gap=r"\n",
)
