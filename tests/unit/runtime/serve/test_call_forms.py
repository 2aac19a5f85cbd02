"""Calls of tools as families write them: read back wherever a text is cut, written by grammars.

What is written here follows the chat templates of DeepSeek-V3 and V3.1, Kimi-K2 and GLM-4.7.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.lettered import TEMPLATE
from serve.served import toy_codec
from serve.test_parsers import decode, read, texts
from serve.test_structured import CHAT, NAME, SCHEMA, chat, client_of, tool

from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.call_forms import CALL_FORMS, form_of
from specbuild.runtime.serve.parsers.marked import MarkedParser
from specbuild.runtime.serve.parsers.registry import TOOL_CALL_PARSERS, MarkedForm, parser_form

Call = tuple[str, dict[str, Any]]


def deepseek(calls: Sequence[Call], body: str) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{body.format(name=name, arguments=json.dumps(arguments))}"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def kimi2(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def glm47(calls: Sequence[Call], gap: str = "") -> str:
    """``gap``: GLM-4.5 ends lines where GLM-4.7 does not."""

    def value(argument: Any) -> str:
        return argument if isinstance(argument, str) else json.dumps(argument)

    def pairs(arguments: dict[str, Any]) -> str:
        return "".join(
            f"{gap}<arg_key>{k}</arg_key>{gap}<arg_value>{value(v)}</arg_value>"
            for k, v in arguments.items()
        )

    return "".join(f"<tool_call>{name}{pairs(a)}{gap}</tool_call>" for name, a in calls)


V3 = "function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
V31 = "{name}<｜tool▁sep｜>{arguments}"
WRITERS = {
    "deepseek3": lambda calls: deepseek(calls, V3),
    "deepseek31": lambda calls: deepseek(calls, V31),
    "kimi2": kimi2,
    "glm47": glm47,
    "glm47, lines": lambda calls: glm47(calls, "\n"),
}
words = st.text("abc_", min_size=1, max_size=6)
plain = texts.filter(lambda text: "```" not in text)
arguments = st.dictionaries(words, st.integers() | plain | st.booleans(), max_size=3)
TYPES = {bool: "boolean", int: "integer", str: "string"}


def output(form: str, text: str, *, tools: Sequence[Any] = (), **given: Any) -> Output:
    calls = CALL_FORMS[form.partition(",")[0]]
    parser = MarkedParser(decode, (), thought=None, calls=calls, tools=tools)
    return read(parser, [ord(c) for c in text], **given)


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=40, deadline=None)
@given(
    before=texts, after=texts, calls=st.lists(st.tuples(words, arguments), min_size=1, max_size=2),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)  # fmt: skip
def test_calls_are_read_as_they_are_written(
    form: str, before: str, after: str, calls: list[Call], cuts: list[int]
) -> None:
    tools = [
        tool(name, {"properties": {k: {"type": TYPES[type(v)]} for k, v in asked.items()}})
        for name, asked in calls[:1]
    ]
    # Of two calls of one name the tool is that of the first.
    calls = [*calls[:1], *(c for c in calls[1:] if c[0] != calls[0][0])]
    found = output(form, f"{before}{WRITERS[form](calls)}{after}", tools=tools, cuts=cuts)
    assert found.content == before + after
    read_calls = [(c.name, json.loads(c.arguments)) for c in found.calls]
    assert [name for name, _ in read_calls] == [name for name, _ in calls]
    assert read_calls[0] == calls[0]
    assert found.finish_reason == "tool_calls"
    if not form.startswith("glm47"):
        assert read_calls == calls


def test_values_of_glm_have_the_types_of_the_schema() -> None:
    text = glm47([("f", {"a": "12", "b": 12, "c": [1, {"d": None}], "e": "null"})])
    typed = tool("f", {"properties": {"a": {"type": "string"}, "e": {"type": "string"}}})
    (call,) = output("glm47", text, tools=[typed]).calls
    assert json.loads(call.arguments) == {"a": "12", "b": 12, "c": [1, {"d": None}], "e": "null"}
    (untyped,) = output("glm47", text).calls
    assert json.loads(untyped.arguments) == {"a": 12, "b": 12, "c": [1, {"d": None}], "e": None}


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
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    found = output(form, text)
    section = CALL_FORMS[form].section
    assert not found.calls
    assert found.content == text.removeprefix(section[0] if section else "")


def test_the_form_goes_by_the_template() -> None:
    for form, write in WRITERS.items():
        shown = write([("f", {"a": 1})])
        assert form_of(shown) == form.partition(",")[0]
        made = parser_form(toy_codec(shown), (28,), reasoning="auto", tool_calls="auto")
        assert isinstance(made, MarkedForm) and made.calls_tools
    assert form_of('<tool_call>{"name": "f"}</tool_call>') == "hermes"
    assert form_of("x") == "none"
    assert set(CALL_FORMS) < set(TOOL_CALL_PARSERS)


@pytest.fixture(scope="module", params=["deepseek3", "deepseek31", "kimi2"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    shown = WRITERS[request.param]([("f", {})])
    yield from client_of("auto", f"{TEMPLATE}{{# {shown} #}}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "b"}}])
def test_grammars_write_what_is_read(client: httpx.Client, choice: Any) -> None:
    made = chat(client, tools=[tool("a"), tool("b")], tool_choice=choice, temperature=1, seed=2)
    calls = [call["function"] for call in made["message"]["tool_calls"]]
    assert made["finish_reason"] == "tool_calls" and calls
    assert {call["name"] for call in calls} <= ({"a", "b"} if choice == "required" else {"b"})
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


def test_calls_without_json_cannot_be_required() -> None:
    for client in client_of("auto", f"{TEMPLATE}{{# {glm47([('f', {'a': 1})])} #}}"):
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
        asked = {"tools": [tool("f")], "tool_choice": "required"}
        answer = client.post(CHAT, json=body | asked)
        assert answer.status_code == 400
        assert "tool_choice be auto" in answer.json()["error"]["message"]
