"""Events that are written when their tokens arrive have the bytes of those written afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve.served import NAME, TEMPLATE, served, worded

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.serve.connection import _CycleBody
from specbuild.runtime.serve.event_stream import TextEvent, event_bytes

MESSAGES = [{"role": "user", "content": "abc"}]
CHAT = {"messages": MESSAGES, "max_tokens": 9}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abcd", "max_tokens": 9}),
    ("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 9, "echo": True}),
    ("/v1/completions", {"prompt": "abcd", "max_tokens": 9, "logprobs": 1}),
    ("/v1/completions", {"prompt": "abcd", "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3, "stop": ["f"]}),
    ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 9, "store": False}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # The draft varies the number of tokens of an event.
    with served(worded(TEMPLATE), setting=DraftSetting(None)) as (url, _):
        yield url


def events(url: str, path: str, body: dict[str, Any]) -> str:
    """Return the body of a stream, without parts that differ between two calls."""
    common = {"model": NAME, "stream": True, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(url + path, json={**common, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    text = re.sub(r"[0-9a-f]{24,32}", "ID", answer.text)
    return re.sub(r'"created(_at)?":\d+', "", text)


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_both_writers_give_equal_events(
    url: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, write = [0], _CycleBody.write

    def counted(self: _CycleBody, data: bytes) -> None:
        direct[0] += 1
        write(self, data)

    monkeypatch.setattr(_CycleBody, "write", counted)
    written = [events(url, path, body) for _ in range(3)]
    assert direct[0] > 0
    monkeypatch.setattr(_CycleBody, "is_ready", lambda _: False)
    before = direct[0]
    assert written == [events(url, path, body)] * 3
    assert direct[0] == before


@pytest.mark.parametrize(
    "text", ["", 'a "quoted" \\ text', "\n\r\t\0\x1f\x7f", "é€𝄞\u2028", "</a>&"]
)
def test_text_in_an_event_is_escaped_as_json(text: str) -> None:
    def chunk_of(text: str) -> dict[str, Any]:
        return {"id": "x", "delta": {"reasoning": text, "more": text}, "end": None}

    event = TextEvent(chunk_of).with_text(text)
    assert json.loads(event.removeprefix(b"data: ")) == chunk_of(text)
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2]
    if "\x7f" not in text:
        assert event == event_bytes(chunk_of(text))


def test_the_name_of_an_event_is_its_type() -> None:
    event = TextEvent(lambda text: {"type": "delta", "text": text}).with_text("a")
    assert event == b'event: delta\ndata: {"type":"delta","text":"a"}\n\n'
