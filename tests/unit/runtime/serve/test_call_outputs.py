"""Outputs that consist of calls only, as Llama writes them, with any split into tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.lettered import lettered_engine
from serve.served import NAME, PlainDecoder, served, toy_codec
from serve.test_parsers import decode, read
from serve.test_structured import tool

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.call_outputs import (
    CALL_STYLES,
    CallOutputFormat,
    CallOutputParser,
)
from specbuild.runtime.serve.parsers.output_formats import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_PARSERS,
    output_format,
)

Call = tuple[str, dict[str, Any]]
TOOLS = [tool(name) for name in ("f", "get_weather", "a.b")]


def llama3_json(calls: Sequence[Call], key: str = "parameters") -> str:
    return "; ".join(json.dumps({"name": name, key: arguments}) for name, arguments in calls)


def pythonic(calls: Sequence[Call]) -> str:
    def written(arguments: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())

    return f"[{', '.join(f'{name}({written(arguments)})' for name, arguments in calls)}]"


WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "json": ("llama3_json", llama3_json),
    "json, tag": ("llama3_json", lambda calls: "<|python_tag|>" + llama3_json(calls)),
    "json, arguments": ("llama3_json", lambda calls: "\n" + llama3_json(calls, "arguments")),
    "python": ("pythonic", pythonic),
    "python, marks": ("pythonic", lambda c: f"<|python_start|>{pythonic(c)}<|python_end|>"),
}
keys = st.text("abc_", min_size=1, max_size=5)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
leaves = st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | texts
values = st.recursive(
    leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=6
)
calls_of = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_weather", "a.b"]), st.dictionaries(keys, values, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


def output(style: str, text: str, *, stop: Sequence[str] = (), **given: Any) -> Output:
    parser = CallOutputParser(decode, stop, CALL_STYLES[style], TOOLS, ())
    return read(parser, [ord(c) for c in text], **given)


def calls_in(parsed: Output) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=60, deadline=None)
@given(calls=calls_of, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_written_calls_are_parsed(form: str, calls: list[Call], cuts: list[int]) -> None:
    style, write = WRITERS[form]
    parsed = output(style, write(calls), cuts=cuts)
    assert calls_in(parsed) == calls
    assert (parsed.content, parsed.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), calls=calls_of)
def test_a_truncated_output_has_no_partial_call(
    form: str, data: st.DataObject, calls: list[Call]
) -> None:
    style, write = WRITERS[form]
    text = write(calls)
    parsed = output(style, text[: data.draw(st.integers(1, len(text) - 1))], end="length")
    assert parsed.finish_reason == "length"
    assert calls_in(parsed) == calls[: len(parsed.calls)]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("llama3_json", '{"name": "f"}'),
        ("llama3_json", '{"name": "f", "parameters": [1]}'),
        ("llama3_json", '{"name": "other", "parameters": {}}'),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"name": "f", "parameters": {}} and more'),
        ("llama3_json", '{"name": "f", "parameters": {"a": NaN}}'),
        ("llama3_json", '{"answer": 1}'),
        ("llama3_json", "Plain text with {braces}."),
        ("llama3_json", '{"name": "f", "parameters": ' + "[" * 5000),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{})]"),
        ("pythonic", "[f(a=g())]"),
        ("pythonic", "[f(a=b'x')]"),
        ("pythonic", "[f(a={1: 2})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=__import__('os').system('x'))]"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "f(a=1)"),
        ("pythonic", "[f(a=" + "(" * 5000),
        ("pythonic", "[f(a=1)"),
    ],
)
def test_text_that_is_not_a_call_is_content(style: str, text: str) -> None:
    parsed = output(style, text)
    assert not parsed.calls
    assert (parsed.content, parsed.finish_reason) == (text, "stop")


PIECES = [
    '{"name": "f", "parameters": {}}', '{"name": "', '{"a": "', '"}', "; ", "[", "]", "f(", ")",
    "a=1", "a='", "'", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "{", "}", " ", "\n",
    "é😀", "STOP", "ST", "\x00", "true", "text", "<",
    *(write([("f", {"a": 1})]) for _, write in WRITERS.values()),
]  # fmt: skip


@pytest.mark.parametrize("style", CALL_STYLES)
@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(0, 300)),
    stop=st.sampled_from([(), ("STOP",)]),
    end=st.sampled_from(["stop", "length"]),
)
def test_the_split_into_tokens_does_not_change_the_result(
    style: str, parts: list[str], cuts: list[int], stop: tuple[str, ...], end: str
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    tokens = [text[a:b] for a, b in pairwise(places)]

    def parse(pieces: Sequence[str]) -> tuple[Any, ...]:
        parser = CallOutputParser(
            PlainDecoder(lambda ids: "".join(pieces[i] for i in ids)),
            stop,
            CALL_STYLES[style],
            TOOLS,
            (),
        )
        parsed = read(parser, range(len(pieces)), end=end)
        return parsed.content, calls_in(parsed), parsed.finish_reason

    assert parse(tokens) == parse(list(text)) == parse([text] if text else [])


TEMPLATES = {
    "llama3_json": "{{ '<|python_tag|>' if false }}",
    "pythonic": "{{ '<|python_start|>' if false }}",
}
CHAT = "{%- for m in messages %}{{ m.content or '' }}\n{% endfor -%}"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("style", CALL_STYLES)
@pytest.mark.parametrize("required", [["city"], [], ["city", "days", "exact"]])
def test_required_calls_are_written_in_the_format_of_the_model(
    style: str, required: list[str]
) -> None:
    """The model is random: only the grammar makes its output a call."""
    tools = [tool("f", SCHEMA | {"required": required}), tool("g.h", SCHEMA)]
    named = {"type": "function", "function": {"name": "f"}}
    with pytest.MonkeyPatch.context() as patch:
        engine = lettered_engine(patch, TEMPLATES[style] + CHAT)
        with served(engine, parser="auto") as (url, app):
            assert isinstance(app.serving.output_format, CallOutputFormat)
            for seed, choice in enumerate([named, "required", named, "required"]):
                body = {
                    "model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": tools,
                    "tool_choice": choice, "seed": seed, "max_tokens": 400,
                    "parallel_tool_calls": seed > 1,
                }  # fmt: skip
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
                message = answer["choices"][0]["message"]
                assert message["content"] is None, answer
                for call in (tool_call["function"] for tool_call in message["tool_calls"]):
                    index = ["f", "g.h"].index(call["name"])
                    assert index == 0 or choice is not named
                    schema = tools[index]["function"]["parameters"]
                    jsonschema.validate(json.loads(call["arguments"]), schema)


def test_parsers_have_the_names_of_other_servers() -> None:
    assert set(TOOL_CALL_ALIASES.values()) <= set(TOOL_CALL_PARSERS)
    assert set(REASONING_ALIASES.values()) <= set(REASONING_PARSERS)
    assert not set(TOOL_CALL_ALIASES) & set(TOOL_CALL_PARSERS)
    output_parser = output_format(toy_codec("x"), (28,), reasoning="none", tool_calls="llama3")
    assert isinstance(output_parser, CallOutputFormat)
    with pytest.raises(RequestError, match="cannot be combined"):
        output_format(toy_codec("x"), (28,), reasoning="qwen3", tool_calls="llama4_pythonic")
