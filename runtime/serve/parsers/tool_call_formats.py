"""The formats of tool calls between markers, one for each model family.

Each format follows the chat template of the family.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.arguments import (
    Tools,
    json_object,
    parsed_json,
)
from specbuild.runtime.serve.parsers.gemma_arguments import read_gemma_call
from specbuild.runtime.serve.parsers.gemma_grammar import GemmaGrammar
from specbuild.runtime.serve.parsers.text_arguments import (
    GLM,
    MINIMAX,
    QWEN3_CODER,
    TextArguments,
)

# Returns a marker, or a literal text, as an expression of a grammar.
Quote = Callable[[str], str]
MakeCallId = Callable[[str, int], str]
# A call's name and its arguments as JSON text, or several of them.
Calls: TypeAlias = tuple[str, str] | list[tuple[str, str]]

DEEPSEEK_SEPARATOR, KIMI_ARGUMENTS = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"
_FENCE, _FENCE_END = "\n```json\n", "```"
MISTRAL_ARGUMENTS = "[ARGS]"
_ID_CHARACTERS = string.ascii_letters + string.digits
_LIST_STARTS: tuple[str, ...] = ("{",)
_ARGUMENT_STARTS: tuple[str, ...] = ("{", MISTRAL_ARGUMENTS, "[CALL_ID]")
_MISTRAL_NAME = re.compile(r"[\w.\-]+\s*")
_MISTRAL_HEADER = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([^\s:]+)(?::\d+)?\s*")

# Text that is not a function's name: other characters, or several words.
_NOT_A_NAME = re.compile(r"[\w.\-]*(?:[^\w.\-\s<]|[ \t]+\w)")


@dataclass(frozen=True)
class ToolCallGrammar:
    """The grammar expression between a call's markers, with the rules and guides it refers to."""

    body: str
    rules: tuple[str, ...] = ()
    parts: Mapping[str, Guide] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCallFormat:
    """A format of tool calls.

    A call is between ``begin`` and ``end``, and all calls are between the markers of ``section``.
    With ``end`` None a call ends where the next one or the output does.
    ``read`` parses the text between the markers: it returns the name and the arguments as JSON
    text, or None if the text is not a call. It raises UnclosedTextError if the text ends within a
    string. ``stop_tokens`` end a turn.
    ``grammar`` returns the expression of a call. Its parameters are a prefix for names of rules,
    the function's name and the guide of the arguments. Two functions follow, which quote a marker
    and a text.
    ``begins_call`` returns whether the text after the begin marker is a call. False means that the
    text only mentions the marker; None means that it is too short to tell.
    ``call_id`` returns the id that the template shows, for the function's name and the number of
    earlier calls in the conversation.
    """

    begin: str
    end: str | None
    read: Callable[[str, Tools], Calls | None]
    grammar: Callable[[str, str, Guide, Quote, Quote], ToolCallGrammar]
    section: tuple[str, str] | None = None
    begins_call: Callable[[str], bool | None] = lambda _text: None
    call_id: MakeCallId | None = None
    stop_tokens: tuple[str, ...] = ()

    def continue_ids(self, num_past_calls: int) -> ToolCallFormat:
        """Return the format with ids that continue after the calls of the conversation."""
        make_id = self.call_id
        if make_id is None:
            return self
        return replace(self, call_id=lambda name, count: make_id(name, num_past_calls + count))


def _read_hermes(body: str, tools: Tools) -> tuple[str, str] | None:
    """Read a JSON object with a name and arguments, which are an object or its JSON text."""
    del tools
    call = json_object(body)
    if call is None:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):
        return _checked_call(name, arguments)
    return _checked_call(name, json.dumps(arguments)) if isinstance(arguments, dict) else None


def _read_deepseek(body: str, tools: Tools) -> tuple[str, str] | None:
    """Read V3's "function", separator, name and fenced arguments, or V3.1's name, separator,
    arguments.
    """
    del tools
    name, separator, arguments = body.partition(DEEPSEEK_SEPARATOR)
    fenced_name, fence, fenced = arguments.partition(_FENCE)
    if fence:
        name, arguments = fenced_name, fenced.rstrip().removesuffix(_FENCE_END)
    return _checked_call(name.strip(), arguments.strip()) if separator else None


def _read_kimi(body: str, tools: Tools) -> tuple[str, str] | None:
    """Read ``functions.name:0``, separator and arguments."""
    del tools
    call, separator, arguments = body.partition(KIMI_ARGUMENTS)
    name = _KIMI_NAME.fullmatch(call)
    return _checked_call(name[1], arguments.strip()) if separator and name else None


def _read_mistral(body: str, tools: Tools) -> Calls | None:
    """Read ``name[ARGS]{…}``, with an id or without ``[ARGS]``, or a list of objects (until v7)."""
    text = body.strip()
    if text.startswith("["):
        calls = [_read_hermes(json.dumps(one), tools) for one in parsed_json(text) or ()]
        return None if not calls or None in calls else [call for call in calls if call is not None]
    header = _MISTRAL_HEADER.match(text)
    return None if header is None else _checked_call(header[1], text[header.end() :])


def _mistral_grammar(
    prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
) -> ToolCallGrammar:
    body = f"{text(name)} {marker(MISTRAL_ARGUMENTS)} @{prefix}"
    return ToolCallGrammar(body, parts={prefix: arguments})


def _mistral_id(name: str, number: int) -> str:
    """Return nine characters: templates of Mistral refuse ids of another length."""
    del name, number
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def _begins_mistral(text: str) -> bool | None:
    if text.startswith("["):
        rest, nexts = text[1:].lstrip(), _LIST_STARTS
    else:
        name = _MISTRAL_NAME.match(text)
        if name is None:
            return False if text else None
        rest, nexts = text[name.end() :], _ARGUMENT_STARTS
    if rest.startswith(nexts):
        return True
    return None if any(marker.startswith(rest) for marker in nexts) else False


def _gemma_grammar(
    prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
) -> ToolCallGrammar:
    return ToolCallGrammar(*GemmaGrammar(prefix, arguments, marker, text).call(name))


def _checked_call(name: object, arguments: str) -> tuple[str, str] | None:
    """Return the call if the name is a string and the arguments are the JSON text of an object."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return None
    return None if json_object(arguments) is None else (name, arguments)


def _deepseek_format(*, fenced: bool) -> ToolCallFormat:
    def grammar(
        prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
    ) -> ToolCallGrammar:
        separator = marker(DEEPSEEK_SEPARATOR)
        if not fenced:
            body = f"{text(name)} {separator} @{prefix}"
        else:
            header, footer = text(f"{name}{_FENCE}"), text(f"\n{_FENCE_END}")
            body = f"{text('function')} {separator} {header} @{prefix} {footer}"
        return ToolCallGrammar(body, parts={prefix: arguments})

    return ToolCallFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _read_deepseek,
        grammar,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )


def _hermes_grammar(
    prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
) -> ToolCallGrammar:
    del marker
    header = f'{{"name": {json.dumps(name)}, "arguments": '
    return ToolCallGrammar(f"{text(header)} @{prefix} {text('}')}", parts={prefix: arguments})


def _kimi_grammar(
    prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
) -> ToolCallGrammar:
    body = f"{text(f'functions.{name}:')} INDEX {marker(KIMI_ARGUMENTS)} @{prefix}"
    return ToolCallGrammar(body, parts={prefix: arguments})


def _kimi_id(name: str, number: int) -> str:
    """Return Kimi-K2's id, which counts all earlier calls (Moonshot AI, "Tool call guidance")."""
    return f"functions.{name}:{number}"


def _starts_with(prefix: str) -> Callable[[str], bool | None]:
    def begins(text: str) -> bool | None:
        return True if text.startswith(prefix) else None if prefix.startswith(text) else False

    return begins


def _begins_with_a_name(text: str) -> bool | None:
    return False if _NOT_A_NAME.match(text) else None


def _text_arguments_format(
    arguments_format: TextArguments,
    begins: Callable[[str], bool | None],
    markers: tuple[str, str] = ("<tool_call>", "</tool_call>"),
    section: tuple[str, str] | None = None,
) -> ToolCallFormat:
    def grammar(
        prefix: str, name: str, arguments: Guide, marker: Quote, text: Quote
    ) -> ToolCallGrammar:
        return ToolCallGrammar(*arguments_format.grammar(prefix, name, arguments, marker, text))

    return ToolCallFormat(*markers, arguments_format.read, grammar, section, begins_call=begins)


TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "hermes": ToolCallFormat(
        "<tool_call>", "</tool_call>", _read_hermes, _hermes_grammar, begins_call=_starts_with("{")
    ),
    "qwen3_coder": _text_arguments_format(QWEN3_CODER, _starts_with("<function=")),
    "glm47": _text_arguments_format(GLM, _begins_with_a_name),
    "minimax": _text_arguments_format(
        MINIMAX,
        _starts_with('name="'),
        ("<invoke", "</invoke>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "mistral": ToolCallFormat(
        "[TOOL_CALLS]",
        None,
        _read_mistral,
        _mistral_grammar,
        begins_call=_begins_mistral,
        call_id=_mistral_id,
    ),
    "gemma4": ToolCallFormat(
        "<|tool_call>",
        "<tool_call|>",
        read_gemma_call,
        _gemma_grammar,
        begins_call=_starts_with("call:"),
        stop_tokens=("<|tool_response>",),
    ),
    "deepseek3": _deepseek_format(fenced=True),
    "deepseek31": _deepseek_format(fenced=False),
    "kimi2": ToolCallFormat(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _read_kimi,
        _kimi_grammar,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call_id=_kimi_id,
    ),
}


# The first format all of whose marks are in a template is the template's.
_TEMPLATE_MARKS = (
    ("deepseek3", (DEEPSEEK_SEPARATOR, "```json")),
    ("deepseek31", (DEEPSEEK_SEPARATOR,)),
    ("kimi2", (KIMI_ARGUMENTS,)),
    ("minimax", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "call:")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm47", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(params_name1=",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument',)),
)


def detect_tool_call_format(template: str) -> str:
    """Return the name of the format that a chat template uses; ``none`` if it uses none."""
    names = (name for name, marks in _TEMPLATE_MARKS if all(mark in template for mark in marks))
    return next(names, "none")
