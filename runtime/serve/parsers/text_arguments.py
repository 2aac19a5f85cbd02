"""Tool calls of GLM and Qwen3-Coder, which write each argument as text between markers.

Strings are written without quotes and other values as JSON, so only the function's schema tells the
type of a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.guides.guide import MAX_GUIDE_BYTES, Guide
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

# Keywords that a grammar cannot enforce in a text without quotes, since it must also find the end
# of the text.
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True)
class TextArguments:
    """A format of tool calls with arguments as text.

    ``name_pattern`` matches the start of a call up to the first argument; its group is the
    function's name. ``argument_pattern`` matches an argument; its groups are name and value.
    ``unclosed_pattern`` matches an argument whose value has no end, and ``nested_pattern`` the
    start of another call, which no value may contain. ``end`` follows the last argument and may be
    absent.

    The other fields describe how a call is written. ``header`` has ``{}`` for the function's name.
    ``name_markers`` precede an argument's name, ``value_markers`` its value, and ``end_marker``
    follows the value. ``whitespace`` is the pattern of white space after the header and each
    argument.
    """

    name_pattern: re.Pattern[str]
    argument_pattern: re.Pattern[str]
    unclosed_pattern: re.Pattern[str]
    nested_pattern: re.Pattern[str]
    end: str
    header: str
    name_markers: tuple[str, ...]
    value_markers: tuple[str, ...]
    end_marker: str
    whitespace: str

    def read(self, body: str, tools: Tools) -> tuple[str, str] | None:
        """Return the name and the arguments; None if invalid. UnclosedTextError if a value has no
        end.
        """
        header = self.name_pattern.match(body)
        if header is None or self.nested_pattern.search(body, header.end()):
            return None
        name, position = header[1], header.end()
        root = parameters_of(name, tools)
        schemas = properties_of(root)
        arguments: dict[str, Any] = {}
        while (match := self.argument_pattern.match(body, position)) is not None:
            key, value = match[1].strip(), match[2]
            arguments[key] = typed_value(value, schemas.get(key), root)
            position = match.end()
        if self.unclosed_pattern.match(body, position):
            raise UnclosedTextError
        if body[position:].strip() not in ("", self.end):
            return None
        try:
            return name, json.dumps(arguments)
        except RecursionError:
            return None

    def grammar(
        self, prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
    ) -> tuple[str, tuple[str, ...], dict[str, Guide]]:
        """Return the grammar expression of a call's body, with the rules and guides to which it
        refers.

        Arguments must follow the order of the schema. RequestError if a strict schema has keywords
        that a grammar of text cannot enforce.
        """
        root = json.loads(arguments.source)
        parameters = resolved(root, root)
        schemas, required = properties_of(root), parameters.get("required")
        required = required if isinstance(required, list) else ()
        size = 0
        all_guides: dict[str, Guide] = {}
        whitespace, any_text = f"{prefix}_gap", f"{prefix}_text"
        rules = [f"{whitespace}: /{self.whitespace}/", *self._text_rule(any_text, marker, text)]

        def argument(key: str, value: str) -> str:
            name_marker = " ".join(map(marker, self.name_markers))
            value_marker = f" {whitespace} ".join(map(marker, self.value_markers))
            return f"{name_marker} {key} {value_marker} {value} {whitespace}"

        elements = []
        for i, (key, schema) in enumerate(schemas.items()):
            values: list[str] = []
            guides: dict[str, Guide] = {}
            for j, choice in enumerate(_choices(schema, root, arguments)):
                if choice is None:
                    values, guides = [any_text], {}
                    break
                size += len(choice.source if isinstance(choice, Guide) else choice)
                if size > MAX_GUIDE_BYTES:
                    raise arguments.error(
                        f"takes more than {MAX_GUIDE_BYTES} bytes as a grammar of its arguments"
                    )
                if isinstance(choice, Guide):
                    guides[f"{prefix}_{i}_{j}"] = choice
                    value = f"@{prefix}_{i}_{j}"
                else:
                    value = text(choice)
                values.append(f"{value} {marker(self.end_marker)}")
            all_guides |= guides
            rules.append(f"{prefix}_{i}: {argument(text(key), '(' + ' | '.join(values) + ')')}")
            elements.append(f"{prefix}_{i}" if key in required else f"{prefix}_{i}?")
        if not schemas and parameters.get("additionalProperties") is not False:
            rules.append(f"{prefix}_any: {argument('NAME', any_text)}")
            elements.append(f"{prefix}_any*")
        footer = text(self.end) if self.end else ""
        body = f"{text(self.header.format(name))} {whitespace} {' '.join(elements)} {footer}"
        return body, tuple(rules), all_guides

    def _text_rule(self, name: str, marker: Quote, text: Quote) -> Iterator[str]:
        """Yield the rule of a text that ends with the end marker.

        If the marker is not a token, the text ends at the marker's first occurrence.
        """
        end = marker(self.end_marker)
        if end == text(self.end_marker):
            yield f"{name}[suffix={end}]: TEXT"
        else:
            yield f"{name}: TEXT {end}"


def _choices(
    schema: Any,
    root: Mapping[str, Any],
    arguments: Guide,
    depth: int = 0,
    seen: set[int] | None = None,
) -> Iterator[str | Guide | None]:
    """Yield the possible values: a literal text, a guide of JSON values, or None for any text.

    ``seen`` has the identities of schemas whose values were yielded before.
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
    literals = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(literals, list):
        yield from (v if isinstance(v, str) else json.dumps(v) for v in literals)
    elif types is None or "string" in types:
        unenforced = [key for key in _TEXT_KEYWORDS if key in schema]
        if unenforced and not arguments.lenient:
            raise arguments.error(
                f"has {unenforced[0]!r}, which this model's call format cannot enforce; leave it "
                "out, or leave out strict"
            )
        yield None
    else:
        shared = {}
        if '"$ref"' in json.dumps(schema):
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        yield Guide.json({**shared, **schema}, lenient=arguments.lenient, name=arguments.name)


GLM = TextArguments(
    name_pattern=re.compile(r"\s*([^\s<]+)\s*"),
    argument_pattern=re.compile(
        r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
    ),
    unclosed_pattern=re.compile(
        r"<arg_key>[^<]*</arg_key>\s*<arg_value>(?!.*</arg_value>)", re.DOTALL
    ),
    nested_pattern=re.compile(r"<tool_call>\s*[\w.\-]+\s*<arg_key>"),
    end="",
    header="{}",
    name_markers=("<arg_key>",),
    value_markers=("</arg_key>", "<arg_value>"),
    end_marker="</arg_value>",
    whitespace=r"\n?",
)
QWEN3_CODER = TextArguments(
    name_pattern=re.compile(r"\s*<function=([^>\s]+)>\s*"),
    argument_pattern=re.compile(
        r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>|\Z)", re.DOTALL
    ),
    unclosed_pattern=re.compile(r"<parameter=[^>\n]+>(?!.*</parameter>)", re.DOTALL),
    nested_pattern=re.compile(r"<tool_call>\s*<function="),
    end="</function>",
    header="<function={}>",
    name_markers=("<parameter=",),
    value_markers=(">\n",),
    end_marker="\n</parameter>",
    whitespace=r"\n",
)
MINIMAX = TextArguments(
    name_pattern=re.compile(r'\s*name="([^">\s]+)">\s*'),
    argument_pattern=re.compile(
        r'<parameter name="([^">\n]+)">(.*?)</parameter>\s*(?=<parameter |\Z)', re.DOTALL
    ),
    unclosed_pattern=re.compile(r'<parameter name="[^">\n]+">(?!.*</parameter>)', re.DOTALL),
    nested_pattern=re.compile(r'<invoke\s+name="'),
    end="",
    header=' name="{}">',
    name_markers=('<parameter name="',),
    value_markers=('">',),
    end_marker="</parameter>",
    whitespace=r"\n?",
)
