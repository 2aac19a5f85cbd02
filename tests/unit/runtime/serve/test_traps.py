"""Known incompatibilities of servers with OpenAI's API: a test for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import pytest
from serve.scripted import ARGUMENTS, GREETING, KEY, THOUGHT, scripted_server
from serve.served import NAME

from specbuild.runtime.request import Event
from specbuild.runtime.serve.chat_choice import ChatFields
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.event_stream import EventSource, EventStream
from specbuild.runtime.serve.generation import Generation
from specbuild.runtime.serve.messages import EFFORTS, template_messages
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.token_batches import TokenBatch, TokenBatches

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        scripted_server() as url,
        httpx.Client(base_url=url, headers=headers, timeout=300) as client,
    ):
        yield client


def ask(client: httpx.Client, said: str, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "messages": [{"role": "user", "content": said}]}
    answer = client.post(CHAT, json=body | fields)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def events(client: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={"model": NAME, "stream": True} | fields) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if "data: " in line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chunks(client: httpx.Client, said: str, **fields: Any) -> list[dict[str, Any]]:
    return events(client, CHAT, messages=[{"role": "user", "content": said}], **fields)


def test_reasoning_has_both_names_in_answers_and_requests(client: httpx.Client) -> None:
    message = ask(client, "think")["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(client, "think")]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == THOUGHT
        turn = {"role": "assistant", "content": "b", name: THOUGHT}
        (read,) = template_messages([turn])
        assert read["thinking"] == read["reasoning_content"] == THOUGHT
    hidden = ask(client, "think", include_reasoning=False)["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": GREETING}


def test_usage_chunk_has_no_choices_and_is_optional(client: httpx.Client) -> None:
    *others, last = chunks(client, "hi", stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    for chunk in (*others, *chunks(client, "hi")):
        assert "usage" not in chunk and len(chunk["choices"]) == 1


def test_arguments_of_calls_are_never_null(client: httpx.Client) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(client, "weather", tools=TOOLS)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "f", "arguments": ""} and calls[0]["id"]
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS


@pytest.mark.parametrize(
    ("said", "fields", "end"),
    [
        ("hi", {}, "stop"),
        ("hi", {"stop": ["<b>"]}, "stop"),
        ("hi", {"max_tokens": 12}, "length"),
        ("weather", {"tools": TOOLS}, "tool_calls"),
        ("weather", {"tools": TOOLS, "logprobs": True}, "tool_calls"),
    ],
)
def test_a_stream_ends_with_a_reason(
    client: httpx.Client, said: str, fields: dict[str, Any], end: str
) -> None:
    assert ask(client, said, **fields)["choices"][0]["finish_reason"] == end
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks(client, said, **fields)]
    assert ends[-1] == end and not any(ends[:-1])


def test_events_of_responses_are_numbered(client: httpx.Client) -> None:
    tools = [{"type": "function", **TOOL}]
    told = events(client, RESPONSES, input="weather", tools=tools)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    items = [event for event in told if "output_index" in event]
    assert [item["output_index"] for item in items] == sorted(i["output_index"] for i in items)
    assert {item["output_index"] for item in items} == {0, 1}  # the reasoning, and the call
    texts = [event for event in told if "_text." in event["type"] or "_part." in event["type"]]
    assert texts and all(event["content_index"] == 0 for event in texts)
    ids = {e["output_index"]: e["item"]["id"] for e in items if e["type"].endswith("item.added")}
    assert all(e["item_id"] == ids[e["output_index"]] for e in items if "item_id" in e)


def test_rejects_unsupported_formats(client: httpx.Client) -> None:
    form = {"type": "structural_tag", "structures": []}
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
    refused = client.post(CHAT, json=body | {"response_format": form})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format.type"
    text = {"format": {"type": "grammar", "name": "x"}}
    refused = client.post(RESPONSES, json={"model": NAME, "input": "hi", "text": text})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text.format.type"


def test_a_call_ends_the_turn(client: httpx.Client) -> None:
    # The script continues after <|call|>.
    (call,) = ask(client, "weather", tools=TOOLS)["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("f", ARGUMENTS)


def test_reasoning_of_a_turn_with_calls_is_passed_to_the_template() -> None:
    """The template decides what to drop and when, so it receives all of it."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    turns = [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": None, "reasoning": THOUGHT, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    read = template_messages(turns)
    assert read[1]["thinking"] == THOUGHT
    assert read[1]["tool_calls"][0]["function"]["arguments"] == json.loads(ARGUMENTS)


@pytest.mark.parametrize("effort", [*EFFORTS, "huge"])
def test_efforts_are_mapped_to_those_of_harmony(effort: str) -> None:
    given: dict[str, Any] = {"model": NAME, "messages": [], "reasoning_effort": effort}
    chat = ChatFields.model_validate(given)
    response = ResponseFields.model_validate(
        {"model": NAME, "input": "hi", "reasoning": {"effort": effort}}
    )
    if effort == "huge":
        with pytest.raises(ApiError, match="must be one of"):
            _ = chat.template_variables
        with pytest.raises(ApiError, match="must be one of"):
            _ = response.effort
        return
    assert chat.template_variables["reasoning_effort"] == response.effort
    assert response.effort in ("low", "medium", "high")
    assert effort not in ("low", "medium", "high") or response.effort == effort


def test_both_names_of_max_tokens_are_accepted(client: httpx.Client) -> None:
    for fields in (
        {"max_tokens": 7},
        {"max_completion_tokens": 7},
        {"max_completion_tokens": 7, "max_tokens": 9},
    ):
        assert ask(client, "hi", **fields)["usage"]["completion_tokens"] == 7


class _Endless:
    """A generation without any token."""

    is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        await asyncio.sleep(1000)
        yield []

    def cancel(self) -> None:
        self.is_cancelled = True


class _Begun(EventSource):
    def begin(self) -> list[dict[str, Any]]:
        return [{"index": 0}]

    def add(self, batch: TokenBatch) -> list[dict[str, Any]]:
        raise AssertionError(f"there are no tokens, but {batch} came")

    def end(self) -> list[dict[str, Any]]:
        return []


def test_disconnecting_before_the_first_token_aborts_the_request() -> None:
    """The client may leave while the first events are sent, before the engine is awaited."""

    async def leave(*, has_begun: bool) -> bool:
        generation = _Endless()
        batches = TokenBatches(cast(Generation, generation))
        events = EventStream(batches, _Begun()).events()
        if has_begun:
            assert await anext(events) == b'data: {"index":0}\n\n'
            await events.aclose()
        else:
            await batches.aclose()
        return generation.is_cancelled

    assert asyncio.run(leave(has_begun=True))
    assert asyncio.run(leave(has_begun=False))


def test_an_invalid_stop_string_starts_no_response(client: httpx.Client) -> None:
    for more in ({}, {"stream": True}, {"background": True}):
        body = {"model": NAME, "input": "slow", "stop": [""], **more}
        answer = client.post(RESPONSES, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "stop"
        assert client.get("/load").json()["server_load"] == 0


def test_a_streamed_chat_has_the_ids_of_all_its_tokens(client: httpx.Client) -> None:
    """This includes tokens whose text is held back, or is empty."""
    for fields in ({}, {"stop": "you"}):
        streamed = chunks(client, "think", return_token_ids=True, **fields)
        ids = [i for chunk in streamed for i in chunk["choices"][0].get("token_ids", ())]
        whole = ask(client, "think", return_token_ids=True, **fields)
        assert ids == whole["choices"][0]["token_ids"]
        assert len(ids) == whole["usage"]["completion_tokens"]


def test_numbers_that_json_does_not_have_are_null_in_answers(client: httpx.Client) -> None:
    """Python's clients can send such numbers in tools, which a response repeats."""
    tools = '[{"type": "function", "name": "f", "parameters": {"x": [NaN, Infinity, 1e400, 1]}}]'
    body = f'{{"model": "{NAME}", "input": "b", "tools": {tools}}}'
    headers = {"Content-Type": "application/json"}
    answer = client.post(RESPONSES, content=body, headers=headers)
    assert answer.status_code == 200
    for text in (answer.text, client.get(f"{RESPONSES}/{answer.json()['id']}").text):
        repeated = json.loads(text, parse_constant=pytest.fail)["tools"]
        assert repeated[0]["parameters"]["x"] == [None, None, None, 1]
