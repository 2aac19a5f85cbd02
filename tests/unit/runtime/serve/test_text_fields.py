"""Fields of the prompt and the output text: truncation, templates, special tokens, stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serve.served import LETTERS, NAME, PlainDecoder, served, worded
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from toy_engine import toy_engine
from toy_model import EOS
from transformers import PreTrainedTokenizerFast

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Request, TokenEvent
from specbuild.runtime.serve.chat_choice import ChatChoice, ChatFields
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.marker_parser import MarkerParser
from specbuild.runtime.serve.parsers.parser import TextParser
from specbuild.runtime.serve.parsers.tool_call_formats import TOOL_CALL_FORMATS
from specbuild.runtime.serve.service import ServiceOptions
from specbuild.runtime.serve.token_batches import TokenBatch
from specbuild.runtime.text.codec import TextCodec

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
START, END = len(LETTERS), len(LETTERS) + 3
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
}
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "bcdefgh"},
    "chat": {"messages": [{"role": "user", "content": "bcdefgh"}]},
    "responses": {"input": "bcdefgh"},
    "tokenize": {"messages": [{"role": "user", "content": "b"}]},
}
SPOKEN = pytest.mark.parametrize("route", ["completions", "chat", "responses"])
STREAMED = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = worded(TEMPLATE)
    assert engine.text is not None
    tokenizer = Tokenizer.from_str(engine.text.tokenizer_json)
    tokenizer.post_processor = TemplateProcessing(
        single="<|call|> $A", special_tokens=[("<|call|>", tokenizer.token_to_id("<|call|>"))]
    )
    text = TextCodec(tokenizer.to_str().encode(), None, TEMPLATE.encode())
    with (
        served(toy_engine(text=text)) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def post(client: httpx.Client, route: str, **fields: Any) -> Any:
    answer = client.post(PATHS[route], json={"model": NAME} | PROMPTS[route] | fields)
    assert answer.status_code == 200, answer.text
    return answer


def refused_field(client: httpx.Client, route: str, **fields: Any) -> str:
    answer = client.post(PATHS[route], json={"model": NAME} | PROMPTS[route] | fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


def text_of(client: httpx.Client, route: str, *, stream: bool = False, **fields: Any) -> str:
    """Return the text of an output of at most 12 greedy tokens."""
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    answer = post(client, route, **({"temperature": 0, limit: 12} | fields), stream=stream)
    if not stream:
        body = answer.json()
        if route == "responses":
            return "".join(part["text"] for item in body["output"] for part in item["content"])
        choice = body["choices"][0]
        return str(choice["text"] if route == "completions" else choice["message"]["content"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: {" in line]
    texts = []
    for event in map(json.loads, lines):
        if route == "responses":
            texts.append(event["delta"] if event["type"].endswith("text.delta") else "")
        else:
            choice = event["choices"][0]
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(texts)


@SPOKEN
@STREAMED
def test_include_stop_str_in_output(client: httpx.Client, route: str, stream: bool) -> None:
    # The text has letters only, none of which ends the output.
    letters = {"logit_bias": {str(i): -100 for i in range(START, EOS + 1)}, "stream": stream}
    text = text_of(client, route, **letters)
    assert len(text) == 12
    stop = text[4:6]
    place = text.index(stop)
    with_stop = {"stop": [stop], **letters}
    assert text_of(client, route, **with_stop) == text[:place]
    included = text_of(client, route, **with_stop, include_stop_str_in_output=True)
    assert included == text[: place + 2]
    token = LETTERS.index(text[5])
    place = text.index(text[5])
    with_token = {"stop_token_ids": [token], **letters}
    if place:
        assert text_of(client, route, **with_token) == text[:place]
    included = text_of(client, route, **with_token, include_stop_str_in_output=True)
    assert included == text[: place + 1]


@SPOKEN
@STREAMED
def test_skip_special_tokens_false_shows_special_tokens(
    client: httpx.Client, route: str, stream: bool
) -> None:
    special = {"logit_bias": {str(START): 100}, "stream": stream}
    assert text_of(client, route, **special) in ("", "None")
    text = text_of(client, route, **special, skip_special_tokens=False)
    assert text == "<|start|>" * 12
    # The end token is in the text only if both fields request it.
    end = {"logit_bias": {str(EOS): 100}, "stream": stream}
    hidden = text_of(client, route, **end, skip_special_tokens=False)
    assert hidden in ("", "None")
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text_of(client, route, **end, **both) == "<eos>"


def prompt_ids(client: httpx.Client, route: str, **fields: Any) -> list[int]:
    answer = post(client, route, max_tokens=3, return_token_ids=True, **fields).json()
    prompt_ids_of_chat = answer["prompt_token_ids"] if route == "chat" else None
    ids: list[int] = prompt_ids_of_chat or answer["choices"][0]["prompt_token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    return ids


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_truncation_keeps_the_end_of_a_prompt(client: httpx.Client, route: str) -> None:
    ids = prompt_ids(client, route)
    assert prompt_ids(client, route, truncate_prompt_tokens=3) == ids[-3:]
    assert prompt_ids(client, route, truncate_prompt_tokens=100) == ids
    right = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert prompt_ids(client, route, **right) == ids[:3]
    assert refused_field(client, route, truncate_prompt_tokens=0) == "truncate_prompt_tokens"
    assert refused_field(client, route, truncate_prompt_tokens=-2) == "truncate_prompt_tokens"
    longest = post(client, "tokenize").json()["max_model_len"]
    text = "bcd" * longest
    long: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    long = {"prompt": text} if route == "completions" else long
    assert len(prompt_ids(client, route, **long, truncate_prompt_tokens=-1)) == longest - 3
    assert client.post(PATHS[route], json={"model": NAME, **long}).status_code == 400


def test_a_stream_returns_the_truncated_prompt(client: httpx.Client) -> None:
    fields = {"truncate_prompt_tokens": 3, "stream": True, "return_token_ids": True}
    first = post(client, "chat", max_tokens=2, **fields).text.splitlines()[0]
    whole = prompt_ids(client, "chat", truncate_prompt_tokens=3)
    assert json.loads(first.removeprefix("data: "))["prompt_token_ids"] == whole


def test_special_tokens_around_a_prompt(client: httpx.Client) -> None:
    call = LETTERS.index(LETTERS[-1]) + 1 + 5  # the sixth control token
    assert prompt_ids(client, "completions")[0] == call
    assert prompt_ids(client, "completions", add_special_tokens=False) == [*range(1, 8)]
    plain = prompt_ids(client, "chat")
    assert plain[0] == START
    assert prompt_ids(client, "chat", add_special_tokens=True) == [call, *plain]
    tokens = post(client, "tokenize").json()["tokens"]
    assert post(client, "tokenize", add_special_tokens=True).json()["tokens"] == [call, *tokens]


TURNS = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "cd"}]


@pytest.mark.parametrize("route", ["chat", "tokenize"])
def test_generation_prompt_and_continued_messages(client: httpx.Client, route: str) -> None:
    def ids(**fields: Any) -> list[int]:
        if route == "chat":
            return prompt_ids(client, route, messages=TURNS, **fields)
        tokens: list[int] = post(client, route, messages=TURNS, **fields).json()["tokens"]
        return tokens

    closed = [START, 1, END, START, 2, 3, END]
    assert ids() == ids(add_generation_prompt=True) == [*closed, START]
    assert ids(add_generation_prompt=False) == closed
    assert ids(continue_final_message=True) == closed[:-1]
    assert ids(continue_final_message=True, add_generation_prompt=False) == closed[:-1]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused_field(client, route, messages=TURNS, **both) == "continue_final_message"
    silent = [TURNS[0], {"role": "assistant", "content": None}]
    field = refused_field(client, route, messages=silent, continue_final_message=True)
    assert field == "continue_final_message"


def test_a_structured_output_begins_a_new_message(client: httpx.Client) -> None:
    form = {"response_format": {"type": "json_object"}, "messages": TURNS}
    for name, value in (("continue_final_message", True), ("add_generation_prompt", False)):
        assert refused_field(client, "chat", **form, **{name: value}) == name


@pytest.mark.parametrize("content", ["cd", "cd ", " c", "d\n\n", "cd<|end|>cd"])
@pytest.mark.parametrize("strip", [False, True])
def test_continued_messages_end_as_in_transformers(content: str, strip: bool) -> None:
    template = TEMPLATE.replace("m.content", "m.content | trim") if strip else TEMPLATE
    engine = worded(template)
    assert engine.text is not None
    tokenizer = Tokenizer.from_str(engine.text.tokenizer_json)
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    turns = [TURNS[0], {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        turns, chat_template=template, tokenize=False, continue_final_message=True
    )
    assert engine.text.render(turns, continue_final_message=True) == expected


def test_a_template_without_the_last_message_cannot_continue_it() -> None:
    engine = worded("{{ messages[0].content }}")
    assert engine.text is not None
    with pytest.raises(RequestError, match="continue_final_message"):
        engine.text.render(TURNS, continue_final_message=True)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_the_answer_has_the_requested_id(client: httpx.Client, route: str) -> None:
    answer = post(client, route, max_tokens=1, request_id="mine").json()
    assert answer["id"].endswith("-mine")


def choice_of_letters(body: ChatFields, *stop: str) -> ChatChoice:
    """Return a choice whose token ids are Unicode's."""
    parser = TextParser(PlainDecoder(lambda ids: "".join(map(chr, ids))), stop)
    options = ServiceOptions(names=("toy",))
    serving: Any = SimpleNamespace(service=SimpleNamespace(options=options))
    request = Request("0", (1,), GenerateParams(), 3)
    return ChatChoice(serving, body, 0, request, Output(parser, single_call=False))


@pytest.mark.parametrize("cuts", [(1, 2, 3), (3,), (2, 3)])
def test_each_token_of_a_batch_has_its_own_chunk(cuts: tuple[int, ...]) -> None:
    """A step may accept several tokens, and steps are merged if the client does not read."""
    choice = choice_of_letters(ChatFields(messages=[], return_token_ids=True))
    tokens = [TokenEvent(0, ord(c), c, False, None) for c in "abc"]
    chunks = []
    for first, end in pairwise((0, *cuts)):
        batch = TokenBatch(0, tokens[first:end], "length" if end == 3 else None)
        chunks += choice.chunks(batch)
    contents = [(c["delta"].get("content"), c["token_ids"], c["finish_reason"]) for c in chunks]
    assert contents == [("a", [97], None), ("b", [98], None), ("c", [99], "length")]


def test_a_streamed_choice_ends_once() -> None:
    """After a stop string its tokens arrive until the other choices have ended."""
    choice = choice_of_letters(ChatFields(messages=[], n=2), "b")
    data = b"".join(
        choice.events({}, TokenBatch(0, [TokenEvent(0, ord(c), c, False, None)])) for c in "abcd"
    )
    data += choice.events({}, TokenBatch(0, [], "length"))
    chunks = [json.loads(line[6:])["choices"][0] for line in data.split(b"\n\n") if line]
    found = [(chunk["delta"].get("content"), chunk["finish_reason"]) for chunk in chunks]
    assert found == [("a", None), (None, "stop")]


def test_without_parallel_calls_only_the_first_is_returned() -> None:
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fg"
    )

    def names(*, single_call: bool) -> list[str]:
        parser = MarkerParser(
            PlainDecoder(lambda ids: "".join(map(chr, ids))),
            (),
            reasoning=None,
            calls=TOOL_CALL_FORMATS["hermes"],
        )
        output = Output(parser, single_call=single_call)
        tokens = [TokenEvent(0, ord(c), c, False, None) for c in text]
        deltas = output.add(TokenBatch(0, tokens, "stop"))
        assert {delta.tool for delta in deltas if delta.tool is not None} == {
            *range(len(output.calls))
        }
        return [call.name for call in output.calls]

    assert names(single_call=False) == ["f", "g"]
    assert names(single_call=True) == ["f"]
