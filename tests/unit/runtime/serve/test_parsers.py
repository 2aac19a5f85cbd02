"""Output parsers: messages in a model's format are parsed, and any other text is content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.served import CONTROL, LETTERS, PlainDecoder, toy_codec

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.harmony import HarmonyParser
from specbuild.runtime.serve.parsers.marker_parser import MarkerParser
from specbuild.runtime.serve.parsers.output_formats import output_format
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.parsers.reasoning import ReasoningState, reasoning_state
from specbuild.runtime.serve.parsers.tool_call_formats import TOOL_CALL_FORMATS
from specbuild.runtime.serve.token_batches import TokenBatch

# The ids of characters are their code points; control tokens have larger ids.
CONTROL_IDS = {name: 0x110000 + i for i, name in enumerate(CONTROL)}


decode = PlainDecoder(lambda ids: "".join(chr(i) for i in ids if i < 0x110000))


def ids_of(text: str) -> list[int]:
    """Return the ids of a text in which ``<|name|>`` are control tokens."""
    ids: list[int] = []
    while text:
        name = next((n for n in CONTROL if text.startswith(f"<|{n}|>")), None)
        ids.append(ord(text[0]) if name is None else CONTROL_IDS[name])
        text = text[1:] if name is None else text[len(name) + 4 :]
    return ids


def read(parser: Any, ids: Sequence[int], cuts: Sequence[int] = (), end: str = "stop") -> Output:
    """Return the output of a parser whose tokens arrive in parts that end at ``cuts``."""
    output = Output(parser)
    tokens = [TokenEvent(0, i, "", False, -1.0) for i in ids]
    ends = [*sorted(c for c in cuts if c < len(ids)), len(ids)]
    start = 0
    for stop in ends:
        last = stop == len(ids)
        output.add(TokenBatch(0, tokens[start:stop], end if last else None))
        start = stop
        if parser.stopped:
            break
    return output


def harmony(text: str, stop: Sequence[str] = (), cuts: Sequence[int] = ()) -> Output:
    return read(HarmonyParser(CONTROL_IDS, decode, stop), ids_of(text), cuts)


@dataclass(frozen=True)
class Message:
    """A message in the format of a model."""

    channel: str
    recipient: str | None
    text: str
    in_role: bool

    def written(self) -> str:
        to = "" if self.recipient is None else f" to={self.recipient}"
        role, channel = ("assistant" + to, "") if self.in_role else ("assistant", to)
        kind = " <|constrain|>json" if self.recipient else ""
        end = "<|call|>" if self.recipient else "<|end|>"
        return f"<|start|>{role}<|channel|>{self.channel}{channel}{kind}<|message|>{self.text}{end}"


texts = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12)
messages = st.builds(
    Message,
    channel=st.sampled_from(["analysis", "commentary", "final"]),
    recipient=st.one_of(st.none(), st.sampled_from(["functions.f", "functions.get_x"])),
    text=texts,
    in_role=st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 200), max_size=8))
def test_written_harmony_messages_are_parsed(written: list[Message], cuts: list[int]) -> None:
    text = "".join(message.written() for message in written).removeprefix("<|start|>assistant")
    output = harmony(text, cuts=cuts)
    plain = [m for m in written if m.recipient is None]
    assert output.content == "".join(m.text for m in plain if m.channel != "analysis")
    assert output.reasoning == "".join(m.text for m in plain if m.channel == "analysis")
    calls = [(m.recipient.removeprefix("functions."), m.text) for m in written if m.recipient]
    assert [(call.name, call.arguments) for call in output.calls] == calls
    assert output.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("no form at all", "no form at all", ""),
        ("<|channel|>final<|message|>yes<|return|>", "yes", ""),
        ("<|channel|>analysis<|message|>hm<|end|>yes<|return|>", "yes", "hm"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "assistant", "hm"),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>yes", "yes", "hm"),
        ("<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final yes", "yes", "hm"),
        ("<|channel|>final<|message|>yes<|end|> and <|return|>", "yes", ""),
        ("<|message|>bare<|end|>", "bare", ""),
        ("<|end|><|end|><|message|>lost<|return|>", "lost", ""),
        ("<|channel|><|channel|>final<|message|>a<|message|>b", "ab", ""),
        ("", "", ""),
    ],
)
def test_malformed_harmony_still_gives_an_answer(text: str, content: str, reasoning: str) -> None:
    output = harmony(text)
    assert (output.content, output.reasoning, output.calls) == (content, reasoning, [])


def test_a_recipient_ends_at_the_constraint() -> None:
    output = harmony("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>")
    assert [(call.name, call.arguments) for call in output.calls] == [("f", "{}")]
    swapped = harmony(" to=functions.f<|channel|>commentary<|message|>{}<|call|>")
    assert [(call.name, call.arguments) for call in swapped.calls] == [("f", "{}")]


def test_stop_strings_apply_to_content_only() -> None:
    text = "<|channel|>analysis<|message|>a STOP b<|end|><|start|>assistant<|channel|>final"
    output = harmony(text + "<|message|>one STOP two<|return|>", stop=["STOP"])
    assert (output.content, output.reasoning) == ("one ", "a STOP b")
    assert output.finish_reason == "stop"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*(f"<|{n}|>" for n in CONTROL), "a", " ", "final", "to=f", "é"])),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_harmony_parser_accepts_any_tokens(parts: list[str], cuts: list[int]) -> None:
    once, again = harmony("".join(parts)), harmony("".join(parts), cuts=cuts)
    assert (once.content, once.reasoning) == (again.content, again.reasoning)
    assert [c.arguments for c in once.calls] == [c.arguments for c in again.calls]


def marked(
    text: str, *, thought: ReasoningState | None = ReasoningState.UNMARKED, **given: Any
) -> Output:
    calls = TOOL_CALL_FORMATS["hermes"]
    parser = MarkerParser(decode, given.pop("stop", ()), reasoning=thought, calls=calls)
    return read(parser, [ord(c) for c in text], **given)


@settings(max_examples=80, deadline=None)
@given(texts, texts, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_reasoning_is_separated_from_content(
    thought: str, answer: str, cuts: list[int], opened: bool
) -> None:
    """``opened``: the prompt begins the reasoning; otherwise the model does."""
    begins = ReasoningState.OPEN if opened else ReasoningState.UNMARKED
    begun = "x" if opened else "<think>x"
    output = marked(f"{begun}{thought}</think>{answer}", thought=begins, cuts=cuts)
    assert (output.reasoning, output.content) == (f"x{thought}", answer)
    unclosed = marked(f"{begun}{thought}", thought=begins, cuts=cuts)
    assert (unclosed.reasoning, unclosed.content) == (f"x{thought}", "")


@settings(max_examples=60, deadline=None)
@given(
    texts,
    st.sampled_from([ReasoningState.CLOSED, ReasoningState.UNMARKED]),
    st.lists(st.integers(0, 20)),
)
def test_an_answer_without_reasoning_is_content(
    answer: str, thought: ReasoningState, cuts: list[int]
) -> None:
    output = marked(answer, thought=thought, cuts=cuts)
    assert (output.reasoning, output.content) == ("", answer)
    assert output.reasoning_tokens == 0
    thinks_again = marked(f"\n<think>\nhm</think>{answer}", thought=thought, cuts=cuts)
    assert (thinks_again.reasoning, thinks_again.content) == ("\nhm", answer)


@pytest.mark.parametrize(
    ("prompt", "thought"),
    [
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningState.CLOSED),
        ("<|im_start|>assistant\n<think>\n", ReasoningState.OPEN),
        ("<|im_start|>assistant\n", ReasoningState.UNMARKED),
        ("<｜Assistant｜></think>", ReasoningState.CLOSED),
        ("<｜Assistant｜><think>", ReasoningState.OPEN),
        ("<|assistant|>\n<think></think>", ReasoningState.CLOSED),
        ("What does <think> do?<|im_end|>\n<|im_start|>assistant\n", ReasoningState.UNMARKED),
        ("", ReasoningState.UNMARKED),
    ],
)
def test_the_prompt_determines_the_reasoning_state(prompt: str, thought: ReasoningState) -> None:
    assert reasoning_state(ChatPrompt(prompt)) is thought


@pytest.mark.parametrize(
    ("continued", "thought"),
    [
        ("<think>\nI believe", ReasoningState.OPEN),
        ("<think>\nno\n</think>\n\nThe answer", ReasoningState.CLOSED),
        ("The answer is", ReasoningState.CLOSED),
    ],
)
def test_a_continued_message_determines_the_reasoning_state(
    continued: str, thought: ReasoningState
) -> None:
    prompt = f"<|im_start|>assistant\n<think>\n\n</think>\n\n{continued}"
    assert reasoning_state(ChatPrompt(prompt, continued=continued)) is thought


def test_harmony_continues_the_message_at_the_end_of_the_prompt() -> None:
    prompt = "<|start|>user<|message|>a<|end|><|start|>assistant"
    for begun, (content, reasoning) in {
        "": ("x", ""),
        "<|channel|>final<|message|>I th": ("x", ""),
        "<|channel|>analysis<|message|>so": ("", "x"),
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant": ("x", ""),
    }.items():
        parser = HarmonyParser(CONTROL_IDS, decode, ["th"])
        _, _, tail = (prompt + begun).rpartition("<|start|>assistant")
        parser.skip(ids_of(tail))
        output = read(parser, ids_of("x<|end|>"))
        assert (output.content, output.reasoning) == (content, reasoning), begun


objects = st.dictionaries(st.text("abc", max_size=3), st.integers() | texts, max_size=3)


@settings(max_examples=60, deadline=None)
@given(texts, objects, texts, st.lists(st.integers(0, 90), max_size=6))
def test_calls_between_markers_are_parsed(
    before: str, arguments: dict[str, Any], after: str, cuts: list[int]
) -> None:
    call = json.dumps({"name": "f", "arguments": arguments})
    output = marked(f"{before}<tool_call>\n{call}\n</tool_call>{after}", thought=None, cuts=cuts)
    assert output.content == before + after
    assert [c.name for c in output.calls] == ["f"]
    assert json.loads(output.calls[0].arguments) == arguments
    assert output.finish_reason == "tool_calls"


def test_markers_without_a_call_are_content() -> None:
    for text in (
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        "a<tool_call>",
        "a<tool",
    ):
        assert marked(text, thought=None).content == text
    assert marked("one STOP two", thought=None, stop=["STOP"]).content == "one "
    assert marked("one ST", thought=None, stop=["STOP"]).content == "one ST"


def test_the_template_determines_the_parser() -> None:
    codec = toy_codec("<|start|>assistant<|channel|>")
    assert output_format(codec, (28,), reasoning="auto", tool_calls="auto").supports_tools
    plain = output_format(toy_codec("x"), (28,), reasoning="auto", tool_calls="auto")
    assert not plain.supports_tools
    thinking = output_format(toy_codec("<think>"), (28,), reasoning="auto", tool_calls="hermes")
    assert thinking.supports_tools
    with pytest.raises(RequestError, match="cannot be combined"):
        output_format(codec, (28,), reasoning="harmony", tool_calls="hermes")
    assert len(LETTERS) == 21


@pytest.fixture(scope="module")
def library() -> Iterator[tuple[Any, Any]]:
    """OpenAI's own harmony parser and roles, if the vocabulary is on this machine."""
    base = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if base is None or not (Path(base) / "o200k_base.tiktoken").is_file():
        pytest.skip("TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken")
    from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

    yield load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS), Role.ASSISTANT


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, min_size=1, max_size=4))
def test_harmony_is_parsed_as_by_openai(library: tuple[Any, Any], written: list[Message]) -> None:
    encoding, assistant = library
    text = "".join(message.written() for message in written).removeprefix("<|start|>assistant")
    ids = encoding.encode(text, allowed_special="all")
    control = {n: encoding.encode(f"<|{n}|>", allowed_special="all")[0] for n in CONTROL}
    by_openai = encoding.parse_messages_from_completion_tokens(ids, assistant)
    output = read(HarmonyParser(control, encoding.decode, ()), ids)
    plain = [m for m in by_openai if m.recipient is None]
    assert output.reasoning == "".join(m.content[0].text for m in plain if m.channel == "analysis")
    assert output.content == "".join(m.content[0].text for m in plain if m.channel != "analysis")
    calls = [
        (m.recipient.removeprefix("functions."), m.content[0].text)
        for m in by_openai
        if m.recipient
    ]
    assert [(call.name, call.arguments) for call in output.calls] == calls
