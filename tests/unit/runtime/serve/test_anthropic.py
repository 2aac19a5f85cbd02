"""Anthropic's client against a server whose model follows a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from serve.scripted import ARGUMENTS, GREETING, KEY, THOUGHT, scripted_server
from serve.served import NAME

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
THINK: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "think"}]}]
WEATHER: list[Any] = [{"role": "user", "content": "weather"}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def create(client: anthropic.Anthropic, messages: list[Any], **fields: Any) -> Any:
    """Return a message; with ``stream``, the one that the client's helper assembles from events."""
    body = {"model": NAME, "max_tokens": 300, "messages": messages} | fields
    if not body.pop("stream", False):
        return client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_text(client: anthropic.Anthropic, stream: bool) -> None:
    message = create(client, HELLO, stream=stream, system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", NAME)
    assert [(block.type, block.text) for block in message.content] == [("text", GREETING)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_thinking(client: anthropic.Anthropic, stream: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 200}
    message = create(client, THINK, stream=stream, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == THOUGHT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [None, {"type": "auto", "disable_parallel_tool_use": True}])
def test_a_tool_call_and_its_result(client: anthropic.Anthropic, stream: bool, choice: Any) -> None:
    fields = {} if choice is None else {"tool_choice": choice}
    message = create(client, WEATHER, stream=stream, tools=TOOLS, **fields)
    call = next(block for block in message.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", json.loads(ARGUMENTS))
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [
        *WEATHER,
        {"role": "assistant", "content": [b.model_dump() for b in message.content]},
        {"role": "user", "content": [result]},
    ]
    after = create(client, turns, stream=stream, tools=TOOLS)
    assert "12 degrees" in after.content[-1].text


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_message(client: anthropic.Anthropic, stream: bool) -> None:
    stopped = create(client, HELLO, stream=stream, stop_sequences=["<b>"])
    assert stopped.content[0].text == GREETING.partition("<b>")[0]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "<b>")
    cut = create(client, HELLO, stream=stream, max_tokens=8)
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 8


def test_events_have_the_order_of_anthropic(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model=NAME, max_tokens=99, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    first: Any = events[0]
    assert first.message.usage.input_tokens > 0 == first.message.usage.output_tokens


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens
    assert count == create(client, HELLO).usage.input_tokens
    assert (
        client.messages.count_tokens(model=NAME, messages=HELLO, tools=TOOLS).input_tokens > count
    )


def test_errors_have_the_format_of_anthropic(client: anthropic.Anthropic, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, HELLO, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for fields in (
        {"messages": [{"role": "user", "content": [image]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "some"}},
        {"thinking": {"type": "often"}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"max_tokens": 0},
        {"output_config": {"format": {"type": "json_schema"}}},
    ):
        body = {"model": NAME, "max_tokens": 9, "messages": HELLO} | fields
        answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEY})
        assert answer.status_code == 400, fields
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"), HELLO)
