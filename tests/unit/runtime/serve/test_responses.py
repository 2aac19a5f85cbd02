"""``/v1/responses`` with OpenAI's client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from serve.served import NAME, TEMPLATE, served, worded
from serve.test_parsers import CONTROL_IDS, decode, ids_of

from specbuild.runtime.serve.messages import template_messages
from specbuild.runtime.serve.parsers.harmony import HarmonyParser
from specbuild.runtime.serve.parsers.parser import Delta
from specbuild.runtime.serve.responses.fields import messages_of
from specbuild.runtime.serve.responses.items import Items

GIVEN: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 9}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with served(worded(TEMPLATE)) as (url, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, *messages: dict[str, str]) -> str:
    answer = client.chat.completions.create(
        model=NAME, messages=list(messages), temperature=0, max_tokens=9
    )
    return str(answer.choices[0].message.content)


def test_a_response_equals_a_chat(client: openai.OpenAI) -> None:
    user = {"role": "user", "content": "bcd"}
    plain = client.responses.create(**GIVEN, input="bcd")
    assert plain.output_text == chat(client, user)
    assert plain.status in ("completed", "incomplete")
    assert plain.usage is not None and plain.usage.output_tokens <= 9
    instructed = client.responses.create(**GIVEN, input=[user], instructions="ef")
    assert instructed.output_text == chat(client, {"role": "system", "content": "ef"}, user)


def test_events_describe_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**GIVEN, input="bcd")
    events = list(client.responses.create(**GIVEN, input="bcd", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    done = [e.text for e in events if e.type == "response.output_text.done"]
    assert done == ([whole.output_text] if whole.output_text else [])


def test_stored_responses_can_be_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(**GIVEN, input="bc")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**GIVEN, input="d", previous_response_id=first.id)
    assistant_message = {"role": "assistant", "content": first.output_text}
    before, after = {"role": "user", "content": "bc"}, {"role": "user", "content": "d"}
    assert second.output_text == chat(client, before, assistant_message, after)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unstored = client.responses.create(**GIVEN, input="bc", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**GIVEN, input="d", previous_response_id=unstored.id)


def test_background_responses_finish_or_are_cancelled() -> None:
    with served(worded(TEMPLATE, max_seq_len=4096)) as (url, app):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        fields = GIVEN | {"input": "bcd", "background": True}
        started = client.responses.create(**fields)
        assert started.status == "queued"
        end_s = time.monotonic() + 120
        while (response := client.responses.retrieve(started.id)).status == "in_progress":
            assert time.monotonic() < end_s
        assert response.output_text == client.responses.create(**GIVEN, input="bcd").output_text
        body = fields | {"max_output_tokens": 4000, "ignore_eos": True}
        long = httpx.post(f"{url}/v1/responses", json=body, timeout=300).json()
        assert client.responses.cancel(long["id"]).status == "cancelled"
        while app.service.open_requests:
            assert time.monotonic() < end_s
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(client.responses.create(**GIVEN, input="b").id)


def items_of(text: str, cuts: Sequence[int] = ()) -> tuple[list[dict[str, Any]], list[Any]]:
    parser, items, events = HarmonyParser(CONTROL_IDS, decode, ()), Items(lambda _: {}), []
    for token_id in ids_of(text):
        events += items.add(parser.push(token_id))
    events += items.add(parser.finish())
    events += items.close("completed")
    return items.items, events


HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>so"
    "<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
)


def test_partial_text_is_available_and_appending_is_linear() -> None:
    items, piece, started_s = Items(lambda _: {}), "a" * 100, time.thread_time()
    for delta in [Delta(content=piece)] * 40_000:
        list(items.add([delta]))
    # Copying the text for each piece would copy 80 GB.
    assert time.thread_time() - started_s < 2
    assert items.items[0]["content"][0]["text"] == piece * 40_000
    list(items.add([Delta(content="b"), Delta(tool=0, name="f"), Delta(tool=0, arguments="{")]))
    assert items.items[0]["content"][0]["text"] == piece * 40_000 + "b"
    assert items.items[1]["arguments"] == "{"
    assert items.items is items.items


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    items, events = items_of(HARMONY)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert items[1]["content"][0]["text"] == "so"
    assert (items[2]["name"], items[2]["arguments"]) == ("f", "{}")
    assert {item["status"] for item in items} == {"completed"}
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [e["output_index"] for e in added] == [0, 1, 2]
    assert [e["item"]["status"] for e in added] == ["in_progress"] * 3
    done = [e for e in events if e["type"] == "response.output_item.done"]
    assert [e["item"] for e in done] == items
    names = [e["type"].removeprefix("response.") for e in events if e["output_index"] == 2]
    assert names == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


def test_output_items_are_accepted_as_input() -> None:
    items, _ = items_of(HARMONY)
    call_id = items[2]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "7"}
    messages = template_messages(messages_of([*items, result]))
    assert [message["role"] for message in messages] == ["assistant", "assistant", "tool"]
    assert messages[0]["content"] == "so" and messages[0]["thinking"] == "hm"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert messages[2]["tool_call_id"] == call_id
