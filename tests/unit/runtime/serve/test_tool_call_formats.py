"""Tool calls in the formats of model families: parsed with any split, and written by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.served import PlainDecoder, toy_codec
from serve.test_parsers import decode, read, texts
from serve.test_structured import tool
from serve.written_calls import WRITERS, Call, glm47, hermes, kimi2, qwen3_coder

from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.marker_parser import MarkerParser
from specbuild.runtime.serve.parsers.output_formats import (
    TOOL_CALL_PARSERS,
    MarkerFormat,
    output_format,
)
from specbuild.runtime.serve.parsers.reasoning import ReasoningState
from specbuild.runtime.serve.parsers.tool_call_formats import (
    TOOL_CALL_FORMATS,
    detect_tool_call_format,
)

# Without a schema, their arguments have no types.
UNTYPED = ("glm47", "qwen3_coder", "minimax")
words = st.text("abc_", min_size=1, max_size=6)
plain = texts.filter(lambda text: "```" not in text)
arguments = st.dictionaries(words, st.integers() | plain | st.booleans(), max_size=3)
TYPES = {bool: "boolean", int: "integer", str: "string"}


def output(
    form: str,
    text: str,
    *,
    tools: Sequence[Any] = (),
    thought: ReasoningState | None = None,
    **given: Any,
) -> Output:
    calls = TOOL_CALL_FORMATS[form.partition(",")[0]]
    parser = MarkerParser(decode, (), reasoning=thought, calls=calls, tools=tools)
    return read(parser, [ord(c) for c in text], **given)


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=40, deadline=None)
@given(
    before=texts, after=texts, calls=st.lists(st.tuples(words, arguments), min_size=1, max_size=2),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)  # fmt: skip
def test_written_calls_are_parsed(
    form: str, before: str, after: str, calls: list[Call], cuts: list[int]
) -> None:
    if form.startswith("mistral"):
        after = ""  # the calls of this family have no end marker
    tools = [
        tool(
            name, {"properties": {k: {"type": TYPES[type(v)]} for k, v in typed_arguments.items()}}
        )
        for name, typed_arguments in calls[:1]
    ]
    # If two tools have one name, the first one counts.
    calls = [*calls[:1], *(c for c in calls[1:] if c[0] != calls[0][0])]
    parsed = output(form, f"{before}{WRITERS[form](calls)}{after}", tools=tools, cuts=cuts)
    assert parsed.content == before + after
    read_calls = [(c.name, json.loads(c.arguments)) for c in parsed.calls]
    assert [name for name, _ in read_calls] == [name for name, _ in calls]
    assert read_calls[0] == calls[0]
    assert parsed.finish_reason == "tool_calls"
    if not form.startswith(UNTYPED):
        assert read_calls == calls


SCHEMA_OF_TYPES: dict[str, Any] = {
    "type": "object",
    "$defs": {"Place": {"type": "string"}, "Unit": {"enum": ["1", "2"]}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "maybe_place": {"oneOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/Unit"},
        "one": {"const": "1"},
        "all": {"allOf": [{"$ref": "#/$defs/Place"}, {"description": "x"}]},
        "count": {"type": "integer"},
        "size": {"type": ["integer", "string"]},
        "flag": {"type": "boolean"},
        "parts": {"type": "array"},
        "loop": {"$ref": "#/properties/loop"},
        "any": {},
    },
}


@pytest.mark.parametrize("write", [glm47, qwen3_coder])
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *((n, "12", "12") for n in ("text", "maybe", "either", "place", "maybe_place", "all")),
        *((n, "1", "1") for n in ("unit", "one")),
        *((n, '{"a": 1}', '{"a": 1}') for n in ("text", "maybe", "maybe_place")),
        *((n, "null", None) for n in ("maybe", "either", "maybe_place", "count", "any")),
        ("text", "null", "null"),
        ("text", " two\nlines ", " two\nlines "),
        ("text", '"quoted"', '"quoted"'),
        ("count", "12", 12),
        ("count", "twelve", "twelve"),
        ("size", "12", 12),
        ("size", "1.5", "1.5"),
        ("size", "large", "large"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("parts", '[1, {"d": null}]', [1, {"d": None}]),
        ("parts", "[1", "[1"),
        ("any", "12", 12),
        ("any", "NaN", "NaN"),
        ("any", "-Infinity", "-Infinity"),
        ("any", "1e999", "1e999"),
        ("loop", "12", 12),
        ("unknown", "12", 12),
    ],
)
def test_parsed_values_have_the_types_of_the_schema(
    write: Any, name: str, text: str, value: Any
) -> None:
    form = "glm47" if write is glm47 else "qwen3_coder"
    (call,) = output(form, write([("f", {name: text})]), tools=[tool("f", SCHEMA_OF_TYPES)]).calls
    assert json.loads(call.arguments, parse_constant=pytest.fail) == {name: value}


def test_a_schema_may_be_a_single_reference() -> None:
    schema = {"$ref": "#/$defs/Args", "$defs": {"Args": SCHEMA_OF_TYPES}}
    (call,) = output("glm47", glm47([("f", {"text": "1"})]), tools=[tool("f", schema)]).calls
    assert json.loads(call.arguments) == {"text": "1"}


@pytest.mark.parametrize("form", ["hermes", "deepseek3", "deepseek31", "kimi2"])
@pytest.mark.parametrize(
    "arguments", ["NaN", '{"a": NaN}', '{"a": -Infinity}', "[1]", '"x"', "null", "1", "{", ""]
)
def test_arguments_must_be_a_json_object(form: str, arguments: str) -> None:
    text = WRITERS[form]([("f", {"sign": 1})]).replace('{"sign": 1}', arguments)
    good = WRITERS[form]([("g", {"a": 1})])
    parsed = output(form, text + good)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("g", {"a": 1})]
    assert "f" in parsed.content and parsed.finish_reason == "tool_calls"


def test_ids_of_kimi_number_the_calls_of_the_conversation() -> None:
    calls = TOOL_CALL_FORMATS["kimi2"].continue_ids(3)
    parser = MarkerParser(decode, (), reasoning=None, calls=calls)
    parsed = read(parser, [ord(c) for c in kimi2([("a.b", {}), ("g", {})])])
    assert [call.id for call in parsed.calls] == ["functions.a.b:3", "functions.g:4"]
    (other,) = output("hermes", hermes([("f", {})])).calls
    assert other.id.startswith("call_")


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("thought", list(ReasoningState))
def test_a_call_ends_open_reasoning(form: str, thought: ReasoningState) -> None:
    begun = "" if thought is ReasoningState.OPEN else "<think>"
    parsed = output(
        form, f"{begun}I call it.{WRITERS[form]([('f', {'a': 1})])}\n</think>\n", thought=thought
    )
    assert parsed.reasoning == "I call it."
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("f", {"a": 1})]
    assert parsed.content.strip() == ""
    assert parsed.finish_reason == "tool_calls"


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm47"])
def test_reasoning_may_contain_the_marker_of_calls(form: str) -> None:
    thought = "I must use <tool_call> tags, not <tool_call></tool_call> alone."
    parsed = output(
        form, f"{thought}</think>Done: <tool_call> is one.", thought=ReasoningState.OPEN
    )
    assert (parsed.reasoning, parsed.content) == (thought, "Done: <tool_call> is one.")
    assert not parsed.calls


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), calls=st.lists(st.tuples(words, arguments), min_size=1, max_size=2))
def test_a_truncated_output_shows_no_markup(
    form: str, data: st.DataObject, calls: list[Call]
) -> None:
    text = WRITERS[form](calls)
    parsed = output(form, "Yes." + text[: data.draw(st.integers(2, len(text) - 1))], end="length")
    # A single character is more likely text than the beginning of the next call.
    assert (
        parsed.content.removesuffix("<").removesuffix("[").strip() == "Yes."
        and parsed.finish_reason == "length"
    )
    assert [call.name for call in parsed.calls] == [name for name, _ in calls][: len(parsed.calls)]


@pytest.mark.parametrize("form", [form for form in WRITERS if not form.startswith("mistral")])
def test_a_call_after_an_invalid_one_is_parsed(form: str) -> None:
    write = WRITERS[form]
    good, text = write([("g", {"b": "2"})]), write([("f", {"a": "1"})])
    end = TOOL_CALL_FORMATS[form.partition(",")[0]].end
    section = TOOL_CALL_FORMATS[form.partition(",")[0]].section
    begin = text.index(TOOL_CALL_FORMATS[form.partition(",")[0]].begin)
    for cut in range(begin + 30, text.index(end)):
        # With and without its end marker, in the same section or before another.
        for broken in (text[:cut], text[:cut] + end):
            parsed = output(form, broken + (good.replace(section[0], "") if section else good))
            assert [call.name for call in parsed.calls][-1:] == ["g"], broken
            assert json.loads(parsed.calls[-1].arguments) in ({"b": "2"}, {"b": 2})


@pytest.mark.parametrize(
    "form", ["hermes", "qwen3_coder", "glm47", "kimi2", "deepseek31", "gemma4", "minimax"]
)
def test_text_in_arguments_may_contain_markers(form: str) -> None:
    name = form.partition(",")[0]
    marks = (
        f"a {TOOL_CALL_FORMATS[name].end} b {TOOL_CALL_FORMATS[name].begin} c </think> <think> "
        "{}\\"
    )
    parsed = output(
        name, f"<think>x{WRITERS[form]([('f', {'a': marks})])}y", thought=ReasoningState.OPEN
    )
    assert [json.loads(call.arguments) for call in parsed.calls] == [{"a": marks}]
    assert (parsed.reasoning, parsed.content) == ("x", "y")


def test_arguments_of_hermes_may_be_a_json_string() -> None:
    text = hermes([("f", {"a": 1})]).replace('{"a": 1}', '"{\\"a\\": 1}"')
    (call,) = output("hermes", text).calls
    assert json.loads(call.arguments) == {"a": 1}
    (bare,) = output("hermes", '<tool_call>{"name": "f"}</tool_call>').calls
    assert bare.arguments == "{}"


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>",
    "<parameter=a>", "\n</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "f\n```json\n", "\n```",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "functions.f:0",
    "<|tool_call_argument_begin|>", "{}", '{"a": "', '"}', '{"name": "f", "arguments": {}}',
    "STOP", "ST", "<", "</", "<tool", "é😀", " ", "\n", "f", "\x00", "\ud7ff",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "<|tool_call>", "<tool_call|>", '<|"|>',
    "call:f{", "a:", "<minimax:tool_call>", '<invoke name="f">', "</invoke>",
    '<parameter name="a">', "</parameter>",
    *(write([("f", {"a": "1"})]) for write in WRITERS.values()),
]  # fmt: skip


@pytest.mark.parametrize("form", [*TOOL_CALL_FORMATS, "none"])
@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=14), cuts=st.lists(st.integers(0, 300)),
    thought=st.sampled_from([None, *ReasoningState]),
    stop=st.sampled_from([(), ("STOP",), ("<tool",)]),
    end=st.sampled_from(["stop", "length"]),
)  # fmt: skip
def test_the_split_into_tokens_does_not_change_the_result(
    form: str,
    parts: list[str],
    cuts: list[int],
    thought: ReasoningState | None,
    stop: tuple[str, ...],
    end: str,
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    tokens = [text[a:b] for a, b in pairwise(places)]

    def parse(pieces: Sequence[str]) -> tuple[Any, ...]:
        parser = MarkerParser(
            PlainDecoder(lambda ids: "".join(pieces[i] for i in ids)),
            stop,
            reasoning=thought,
            calls=TOOL_CALL_FORMATS.get(form),
        )
        parsed = read(parser, range(len(pieces)), end=end)
        calls = [(call.name, call.arguments) for call in parsed.calls]
        for _, arguments in calls:
            assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
        return parsed.content, parsed.reasoning, calls, parsed.finish_reason

    whole = parse([text] if text else [])
    assert parse(tokens) == whole
    assert parse(list(text)) == whole


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("deepseek3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
        ("deepseek31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]"),
        ("kimi2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_end|>"),
        ("glm47", "<tool_call></tool_call>"),
        ("glm47", "a<tool_ca"),
    ],
)
def test_text_that_is_not_a_call_is_content(form: str, text: str) -> None:
    parsed = output(form, text)
    section = TOOL_CALL_FORMATS[form].section
    assert not parsed.calls
    assert parsed.content == text.removeprefix(section[0] if section else "")


def test_the_template_determines_the_format() -> None:
    for form, write in WRITERS.items():
        shown = write([("f", {"a": 1})])
        assert detect_tool_call_format(shown) == form.partition(",")[0]
        parsed = output_format(toy_codec(shown), (28,), reasoning="auto", tool_calls="auto")
        assert isinstance(parsed, MarkerFormat) and parsed.supports_tools
    assert detect_tool_call_format('<tool_call>{"name": "f"}</tool_call>') == "hermes"
    assert detect_tool_call_format("x") == "none"
    assert set(TOOL_CALL_FORMATS) < set(TOOL_CALL_PARSERS)


@pytest.mark.parametrize("form", WRITERS)
def test_without_tools_markers_of_calls_are_content(form: str) -> None:
    """As with ``tool_choice: "none"``: the client has no function to call."""
    text = WRITERS[form]([("f", {"a": 1})])
    codec: Any = SimpleNamespace(decode_all=decode, token_id=lambda _: None)
    call_format = TOOL_CALL_FORMATS[form.partition(",")[0]]
    parsed = MarkerFormat(codec, markers=None, call_format=call_format, eos=())
    ids = [ord(letter) for letter in text]
    assert [call.name for call in read(parsed.parser((), [tool("f")]), ids).calls] == ["f"]
    without = read(parsed.parser((), ()), ids)
    assert not without.calls and without.content == text
