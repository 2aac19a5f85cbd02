"""How models write calls of tools between marks: one form for each family.

Each is what the family's chat template shows of earlier calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]
# A piece of a grammar: a mark as a token or as text, and a text in quotes.
Quote = Callable[[str], str]

ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
DEEPSEEK_SEPARATOR, KIMI_ARGUMENTS = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"
_DEEPSEEK_FENCE = re.compile(r"(.*?)\n```json\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True)
class CallForm:
    """A call stands between ``begin`` and ``end``, all calls within the marks of a ``section``.

    ``read`` gives the name and the arguments, as JSON text, of what stands between the marks, and
    None where that is no call; it is given the tools, as templates take them. ``body`` is the
    grammar of it, by the function's name and the rule of its arguments, with how a mark and how a
    text is written; None where no JSON grammar of arguments can stand in it.
    """

    begin: str
    end: str
    read: Callable[[str, Tools], tuple[str, str] | None]
    body: Callable[[str, str, Quote, Quote], str] | None
    section: tuple[str, str] | None = None


def _hermes(body: str, tools: Tools) -> tuple[str, str] | None:
    del tools
    called = _json_of(body)
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        return None
    arguments = called.get("arguments", {})
    return called["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


def _glm(body: str, tools: Tools) -> tuple[str, str] | None:
    """A name, then keys and values: texts as they are, all else as JSON, by the tool's schema."""
    name = body.partition("<arg_key>")[0].strip()
    if not name or "<" in name:
        return None
    types = _types_of(name, tools)
    pairs = {key.strip(): value for key, value in ARGUMENT.findall(body)}
    return name, json.dumps({k: _typed(v, types.get(k)) for k, v in pairs.items()})


def _deepseek(body: str, tools: Tools) -> tuple[str, str] | None:
    """V3's: ``function``, separator, name, arguments in a fence; V3.1's: name, separator, these."""
    del tools
    first, separator, rest = body.partition(DEEPSEEK_SEPARATOR)
    fenced = _DEEPSEEK_FENCE.fullmatch(rest.strip())
    name, arguments = fenced.groups() if fenced else (first, rest)
    name, arguments = name.strip(), arguments.strip()
    return (name, arguments) if separator and name and _is_object(arguments) else None


def _kimi(body: str, tools: Tools) -> tuple[str, str] | None:
    """``functions.name:0``, separator, arguments."""
    del tools
    called, separator, arguments = body.partition(KIMI_ARGUMENTS)
    name, arguments = (
        called.strip().rpartition(":")[0].removeprefix("functions."),
        arguments.strip(),
    )
    return (name, arguments) if separator and name and _is_object(arguments) else None


def _json_of(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_object(text: str) -> bool:
    return isinstance(_json_of(text), dict)


def _types_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """The JSON types of a function's parameters, as its schema names them."""
    functions = (tool.get("function", {}) for tool in tools)
    schema = next((f.get("parameters") for f in functions if f.get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {k: v.get("type") for k, v in properties.items() if isinstance(v, Mapping)}


def _typed(value: str, kind: object) -> Any:
    """A text where the schema says so; else what it is as JSON, and a text where it is none."""
    if kind == "string":
        return value
    found = _json_of(value)
    return value if found is None and value != "null" else found


def _deepseek_form(*, fenced: bool) -> CallForm:
    def body(name: str, arguments: str, mark: Quote, text: Quote) -> str:
        separator = mark(DEEPSEEK_SEPARATOR)
        if not fenced:
            return f"{text(name)} {separator} {arguments}"
        before, behind = text(f"{name}\n```json\n"), text("\n```")
        return f"{text('function')} {separator} {before} {arguments} {behind}"

    return CallForm(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek,
        body,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )


def _hermes_body(name: str, arguments: str, mark: Quote, text: Quote) -> str:
    del mark
    before = f'{{"name": {json.dumps(name)}, "arguments": '
    return f"{text(before)} {arguments} {text('}')}"


def _kimi_body(name: str, arguments: str, mark: Quote, text: Quote) -> str:
    return f"{text(f'functions.{name}:')} INDEX {mark(KIMI_ARGUMENTS)} {arguments}"


CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm("<tool_call>", "</tool_call>", _hermes, _hermes_body),
    "glm47": CallForm("<tool_call>", "</tool_call>", _glm, None),
    "deepseek3": _deepseek_form(fenced=True),
    "deepseek31": _deepseek_form(fenced=False),
    "kimi2": CallForm(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _kimi,
        _kimi_body,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
}


def form_of(template: str) -> str:
    """The name of the form that a chat template shows; ``none`` where it shows none of these."""
    if DEEPSEEK_SEPARATOR in template:
        return "deepseek3" if "```json" in template else "deepseek31"
    if KIMI_ARGUMENTS in template:
        return "kimi2"
    if CALL_FORMS["hermes"].begin in template:
        return "glm47" if "<arg_key>" in template else "hermes"
    return "none"
