"""Outputs that consist of tool calls without end markers: Llama's JSON and Python's syntax.

The complete output is either an answer or calls. It is held back from its first character on while
it may be calls, and read at its end.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.serve.parsers.arguments import Tools, properties_of, resolved
from specbuild.runtime.serve.parsers.output_constraint import OutputConstraint
from specbuild.runtime.serve.parsers.parser import (
    ChatPrompt,
    ContentStop,
    Delta,
    OutputParser,
    TextParser,
)
from specbuild.runtime.serve.parsers.tool_call_formats import MakeCallId
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.stream import Decode, Detokenizer, Stop, StopText

Call = tuple[str, str]
_NO_PROMPT = ChatPrompt()
_JSON_BEGIN = re.compile(r'\s*(?:<\|python_tag\|>)?\s*\{\s*"(?:name|type)"')
_PYTHON_BEGIN = re.compile(r"\s*(?:<\|python_start\|>)?\s*\[\s*[A-Za-z_][\w.]*\(")
# A longer text is no call: an answer that begins like one must not be held back without end.
_MAX_CALL_CHARACTERS = 1 << 18
# Longest text before the part that shows whether calls follow.
_MAX_BEGIN = 128
_DECODER = json.JSONDecoder()
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class CallStyle:
    """How calls are written.

    ``begin`` matches the start of calls. ``read`` returns the names and arguments, as JSON text, of
    a complete text; None if the text is no list of calls. ``grammar`` returns the expression of one
    call with the rules and guides that it refers to, for a prefix of their names. ``opening``,
    ``separator`` and ``closing`` are the texts around the calls.
    """

    begin: re.Pattern[str]
    read: Callable[[str], list[Call] | None]
    grammar: Callable[[str, str, Guide], tuple[str, list[str], dict[str, Guide]]]
    opening: str = ""
    separator: str = "; "
    closing: str = ""


def _read_json(text: str) -> list[Call] | None:
    """Read JSON objects with a name and parameters or arguments, separated by semicolons."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[Call] = []
    position = 0
    while position < len(text):
        try:
            call, position = _DECODER.raw_decode(text, position)
            arguments = call.get("parameters", call.get("arguments"))
            is_call = isinstance(call.get("name"), str) and isinstance(arguments, dict)
            if not is_call:
                return None
            calls.append((call["name"], json.dumps(arguments, allow_nan=False)))
        except (ValueError, RecursionError, AttributeError):
            return None
        while position < len(text) and text[position] in "; ,\n\t":
            position += 1
    return calls or None


def _read_python(text: str) -> list[Call] | None:
    """Read a list of Python calls whose arguments are keywords and literals."""
    text = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = [_python_call(element) for element in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls or None


def _python_call(node: ast.expr) -> Call:
    """Return a call. ValueError if the node is none."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[keyword.arg] = _python_value(keyword.value)
    return ast.unparse(node.func), json.dumps(arguments, allow_nan=False)


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal of Python or JSON. ValueError for other expressions."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        if any(not isinstance(key, ast.Constant) for key in node.keys):
            raise ValueError
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError
    return value


def _json_grammar(
    prefix: str, name: str, arguments: Guide
) -> tuple[str, list[str], dict[str, Guide]]:
    header = json.dumps(f'{{"name": {json.dumps(name)}, "parameters": ', ensure_ascii=False)
    return f'{header} @{prefix} "}}"', [], {prefix: arguments}


def _python_grammar(
    prefix: str, name: str, arguments: Guide
) -> tuple[str, list[str], dict[str, Guide]]:
    """Return a call with arguments in the order of the schema, whose values are JSON.

    Python's reader accepts JSON's ``true``, ``false`` and ``null``.
    """
    root = json.loads(arguments.source)
    schemas, required = properties_of(root), resolved(root, root).get("required")
    required = required if isinstance(required, list) else []
    keys = sorted(schemas, key=lambda key: key not in required)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    parts, rules = {}, []
    for i, key in enumerate(keys):
        schema = schemas[key]
        guide_schema = {**shared, **schema} if isinstance(schema, Mapping) else schema
        parts[f"{prefix}_{i}"] = Guide.json(
            guide_schema, lenient=arguments.lenient, name=arguments.name
        )
        rules.append(f"{prefix}_{i}: {json.dumps(f'{key}=')} @{prefix}_{i}")
    num_required = sum(key in required for key in keys)
    names = [f"{prefix}_{i}" for i in range(len(keys))]
    optional = [f'(", " {rule})?' for rule in names[num_required:]]
    if num_required:
        body = ' ", " '.join(names[:num_required]) + " " + " ".join(optional)
    else:
        # The first argument that is present has no separator before it.
        starts = [" ".join([rule, *optional[i + 1 :]]) for i, rule in enumerate(names)]
        body = f"({' | '.join(starts)})?" if starts else ""
    return f'{json.dumps(f"{name}(")} {body} ")"', rules, parts


CALL_STYLES: Mapping[str, CallStyle] = {
    "llama3_json": CallStyle(_JSON_BEGIN, _read_json, _json_grammar),
    "pythonic": CallStyle(_PYTHON_BEGIN, _read_python, _python_grammar, "[", ", ", "]"),
}


class CallOutputParser(ContentStop):
    """Parses an output that is either content or calls of ``tools``.

    Calls of other functions are content. Calls that are truncated by the token limit are omitted.
    """

    def __init__(
        self, decode: Decode, stop: Stop, style: CallStyle, tools: Tools, dropped: Sequence[int]
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop: StopText = StopText(stop)
        self._style = style
        self._names = {tool["function"]["name"] for tool in tools}
        self._dropped = frozenset(dropped)
        self._held = ""
        self._is_held = True

    @property
    def in_content(self) -> bool:
        """Whether the output is not known to be calls."""
        return not self._is_held or self._style.begin.match(self._held) is None

    def push(self, token_id: int) -> list[Delta]:
        """Return the deltas that a token completes."""
        if token_id in self._dropped:
            return []
        text = self._detokenizer.push(token_id)
        if not self._is_held:
            return self._content(text)
        self._held += text
        if self._may_be_calls():
            return []
        return self._release()

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """See :class:`OutputParser`."""
        rest = self._detokenizer.flush()
        deltas: list[Delta] = []
        if not self._is_held:
            deltas = self._content(rest)
        else:
            self._held += rest
            calls = self._style.read(self._held)
            if calls is not None and all(name in self._names for name, _ in calls):
                return [
                    delta
                    for i, (name, arguments) in enumerate(calls)
                    for delta in (Delta(tool=i, name=name), Delta(tool=i, arguments=arguments))
                ]
            if not truncated or self._style.begin.match(self._held) is None:
                deltas = self._release()
        last = self._stop.finish()
        return [*deltas, Delta(last)] if last else deltas

    def _may_be_calls(self) -> bool:
        """Whether the held text begins calls, or is too short to tell."""
        if self._style.begin.match(self._held) is not None:
            return len(self._held) <= _MAX_CALL_CHARACTERS
        stripped = self._held.lstrip()
        return len(stripped) < _MAX_BEGIN and (not stripped or stripped[0] in "<{[")

    def _release(self) -> list[Delta]:
        """Return the held text as content."""
        text, self._held, self._is_held = self._held, "", False
        return self._content(text)

    def _content(self, text: str) -> list[Delta]:
        visible = self._stop.push(text)
        return [Delta(visible)] if visible else []


class CallOutputFormat:
    """Outputs that are either content or calls in one style."""

    supports_tools = True
    limits_reasoning = False
    call_id: MakeCallId | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, codec: TextCodec, style: CallStyle, *, eos: Sequence[int]) -> None:
        self._codec, self._style, self._eos = codec, style, tuple(eos)

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """See :class:`OutputFormat`."""
        del prompt
        codec = self._codec
        if not tools:
            return TextParser(codec.decode if skip_special_tokens else codec.decode_all, stop)
        dropped = self._eos if skip_special_tokens else ()
        return CallOutputParser(codec.decode_all, stop, self._style, tools, dropped)

    def guide(self, constraint: OutputConstraint, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return a grammar of the answer or calls."""
        del prompt
        if not constraint.calls:
            assert constraint.content is not None
            return constraint.content
        style = self._style
        bodies, rules = [], [f"start: {constraint.alternatives}"]
        parts: dict[str, Guide] = {}
        for i, (name, arguments) in enumerate(constraint.calls):
            body, body_rules, body_parts = style.grammar(f"arguments{i}", name, arguments)
            bodies.append(body)
            rules += body_rules
            parts |= body_parts
        if constraint.answer is not None:
            rules.append("answer: @content")
        several = f"({json.dumps(style.separator)} call)*" if constraint.allows_several else ""
        opening, closing = (json.dumps(t) if t else "" for t in (style.opening, style.closing))
        rules += [f"calls: {opening} call {several} {closing}", f"call: {' | '.join(bodies)}"]
        return constraint.grammar(rules, parts)

    def reasoning_budget(self, tokens: int, prompt: ChatPrompt) -> ReasoningBudget | None:
        """Return None: there is no reasoning."""
        del tokens, prompt
        return None
