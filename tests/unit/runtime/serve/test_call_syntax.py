"""Special syntax of calls of Gemma 4 and Mistral, and reasoning in the markers of every family."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.served import toy_codec
from serve.test_parsers import decode, read, texts
from serve.test_tool_call_formats import output
from serve.written_calls import gemma4, mistral

from specbuild.runtime.serve.parsers.marker_parser import MarkerParser
from specbuild.runtime.serve.parsers.output_formats import MarkerFormat, output_format
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.parsers.reasoning import (
    REASONING_MARKERS,
    ReasoningState,
    reasoning_state,
)


def test_values_of_gemma_may_be_nested() -> None:
    call_arguments = {
        "a": {"b": ["x, y", 1, {"c": None}]},
        "d": True,
        "e": -1.5,
        "f": "",
        "g": [],
        "h": {},
    }
    (call,) = output("gemma4", gemma4([("f.g-h", call_arguments)])).calls
    assert (call.name, json.loads(call.arguments)) == ("f.g-h", call_arguments)
    (call,) = output("gemma4", '<|tool_call>call:f{<|"|>a b<|"|>: bare}<tool_call|>').calls
    assert json.loads(call.arguments) == {"a b": "bare"}


@pytest.mark.parametrize(
    "body", ["call:f{a}", "call:f{a:1", "call:f{a:1}}", "call:f{a:1 b:2}", "call:f[1]", "f{}",
             "call:f{a:" + "[" * 100 + "]" * 100 + "}", "call:f{,}", "call:f{a:,}"],
)  # fmt: skip
def test_invalid_calls_of_gemma_are_content(body: str) -> None:
    parsed = output("gemma4", f"<|tool_call>{body}<tool_call|>")
    assert not parsed.calls and parsed.content == f"<|tool_call>{body}<tool_call|>"


def test_ids_of_mistral_have_nine_characters() -> None:
    first, second = output("mistral", mistral([("f", {}), ("g", {})])).calls
    assert len(first.id) == len(second.id) == 9 and first.id != second.id
    assert first.id.isalnum()


def test_a_complete_call_of_mistral_is_returned_at_the_token_limit() -> None:
    text = mistral([("f", {"a": "x"})])
    assert [call.name for call in output("mistral", text, end="length").calls] == ["f"]
    assert not output("mistral", text[:-1], end="length").calls


@pytest.mark.parametrize("kind", REASONING_MARKERS)
@settings(max_examples=40, deadline=None)
@given(thought=texts, answer=texts, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_reasoning_is_between_the_markers_of_its_family(
    kind: str, thought: str, answer: str, cuts: list[int]
) -> None:
    marks = REASONING_MARKERS[kind]
    vocabulary = f"{marks.begin}{marks.end}"
    output_parser = output_format(toy_codec(vocabulary), (28,), reasoning="auto", tool_calls="auto")
    assert isinstance(output_parser, MarkerFormat) and output_parser.markers is marks
    text = f"{marks.begin}{thought}{marks.end}{answer}"
    parser = MarkerParser(decode, (), reasoning=ReasoningState.UNMARKED).between(marks)
    parsed = read(parser, [ord(c) for c in text], cuts=cuts)
    assert (parsed.reasoning, parsed.content) == (thought, answer)


def test_a_prompt_of_gemma_may_end_reasoning() -> None:
    marks = REASONING_MARKERS["gemma4"]
    for text, state in (
        ("<|turn>model\n", ReasoningState.UNMARKED),
        ("<|turn>model\n<|channel>thought\n<channel|>", ReasoningState.CLOSED),
        ("<|turn>model\n<|channel>thought\n", ReasoningState.OPEN),
    ):
        assert reasoning_state(ChatPrompt(text), marks) is state
