"""Every invalid request is answered with OpenAI's error object, without effect on others."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from serve.served import NAME, TEMPLATE, served, worded
from starlette.types import Message, Receive, Scope, Send

from specbuild.runtime.serve import guards
from specbuild.runtime.serve.app import App

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = "Content-Type: application/json"
TYPED = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "b"}]
# Bodies, and a word of the field or the reason that the answer contains.
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (COMPLETIONS, {"model": "nobody", "prompt": "b"}, 404, "nobody"),
    (COMPLETIONS, {"model": 5, "prompt": "b"}, 400, "model"),
    (COMPLETIONS, {"model": NAME}, 400, "prompt"),
    (COMPLETIONS, {"model": NAME, "prompt": ""}, 400, "empty"),
    (COMPLETIONS, {"model": NAME, "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"model": NAME, "prompt": [[]]}, 400, "empty"),
    (COMPLETIONS, {"model": NAME, "prompt": [1, "b"]}, 400, "prompt"),
    (COMPLETIONS, {"model": NAME, "prompt": [1, True]}, 400, "prompt"),
    (COMPLETIONS, {"model": NAME, "prompt": [29]}, 400, "vocabulary"),
    (COMPLETIONS, {"model": NAME, "prompt": [-1]}, 400, "vocabulary"),
    (COMPLETIONS, {"model": NAME, "prompt": "b" * 64}, 400, "max_seq_len"),
    (COMPLETIONS, {"model": NAME, "prompt": "b" * 5000}, 400, "tokens"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "max_tokens": "7"}, 400, "max_tokens"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "temperature": 1e300}, 400, "temperature"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "top_k": 2**40}, 400, "top_k"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "n": 0}, 400, "n is 0"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "n": 10**9}, 400, "n is"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "stop": [""]}, 400, "stop"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "suffix": "x"}, 400, "suffix"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "bad_words": [""]}, 400, "bad_words"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "stream_options": {}}, 400, "stream_options"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "priority": 2**31}, 400, "priority"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "priority": "low"}, 400, "priority"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "timeout": 0}, 400, "timeout"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "timeout": 1e-9}, 504, "timeout"),
    (COMPLETIONS, {"model": NAME, "prompt": "b", "timeout": 1e-9, "stream": True}, 504, "timeout"),
    (CHAT, {"model": NAME, "messages": HELLO, "timeout": 1e-9}, 504, "timeout"),
    (CHAT, {"model": NAME, "messages": []}, 400, "messages"),
    (CHAT, {"model": NAME, "messages": [{"role": "", "content": "b"}]}, 400, "role"),
    (CHAT, {"model": NAME, "messages": [{"role": "user"}]}, 400, "content"),
    (CHAT, {"model": NAME, "messages": [{"role": "user", "content": 5}]}, 400, "content"),
    (
        CHAT,
        {"model": NAME, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "image_url",
    ),
    (
        CHAT,
        {"model": NAME, "messages": HELLO, "tools": [{"type": "web_search"}]},
        400,
        "web_search",
    ),
    (
        CHAT,
        {"model": NAME, "messages": HELLO, "tools": [{"type": "function", "function": {}}]},
        400,
        "name",
    ),
    (CHAT, {"model": NAME, "messages": HELLO, "reasoning_effort": "huge"}, 400, "effort"),
    (CHAT, {"model": NAME, "messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs"),
    (
        CHAT,
        {"model": NAME, "messages": HELLO, "response_format": {"type": "json_object"}},
        400,
        "cannot read the engine's tokenizer",
    ),
    (CHAT, {"model": NAME, "messages": HELLO, "modalities": ["audio"]}, 400, "modalities"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
    ("/detokenize", {"tokens": [99]}, 400, "vocabulary"),
    ("/detokenize", {"tokens": [1] * (8 * 64 + 1)}, 400, "at most 512"),
    # Every stop string is compared with each token.
    (COMPLETIONS, {"model": NAME, "prompt": "b", "stop": ["x"] * 129}, 400, "at most 128"),
    (CHAT, {"model": NAME, "messages": HELLO, "stop": "x" * 4097}, 400, "4096 characters"),
    (CHAT, {"model": NAME, "messages": HELLO, "stop_token_ids": [1] * 1025}, 400, "at most 1024"),
    # A client may not send the number that the server uses for the largest possible length.
    (COMPLETIONS, {"model": NAME, "prompt": "b", "max_tokens": 2**31 - 1}, 400, "the context has"),
    *(
        (CHAT, {"model": NAME, "messages": HELLO, "chat_template_kwargs": {name: value}}, 400, name)
        for name, value in [
            ("add_generation_prompt", False),
            ("continue_final_message", True),
            ("messages", HELLO),
            ("tools", []),
            ("chat_template", "b"),
        ]
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, App]]:
    with served(worded(TEMPLATE)) as started:
        yield started


@pytest.mark.parametrize(("path", "body", "status", "named"), REFUSED)
def test_the_error_names_the_invalid_field(
    server: tuple[str, App], path: str, body: dict[str, Any], status: int, named: str
) -> None:
    answer = httpx.post(server[0] + path, json=body, timeout=300)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert named in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800", "prompt": "b"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "toy", "prompt": [1' + b"0" * 6000 + b"]}",
        b'{"model": "toy", "prompt": "b", "temperature": NaN}',
        b'{"model": "toy", "prompt": "b", "max_tokens": 1e400}',
        b'"text"',
        b"null",
    ],
)
def test_rejects_invalid_bodies(server: tuple[str, App], content: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = httpx.post(server[0] + path, content=content, headers=TYPED, timeout=300)
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert answer.json()["error"]["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = """prompt messages max_tokens temperature top_p top_k seed n stop stream stream_options
    tools tool_choice logprobs top_logprobs echo response_format reasoning_effort min_p priority
    min_tokens logit_bias presence_penalty repetition_penalty
    chat_template_kwargs stop_token_ids best_of"""
names = st.sampled_from(FIELDS.split())


@examples(25)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), fields=st.dictionaries(names, json_values))
def test_any_fields_give_an_answer_or_an_error(
    server: tuple[str, App], path: str, fields: dict[str, Any]
) -> None:
    values = {"prompt": "b", "messages": HELLO, "max_tokens": 2} | fields
    body = json.dumps({"model": NAME} | values)
    answer = httpx.post(
        server[0] + path, content=body.encode(errors="replace"), headers=TYPED, timeout=300
    )
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text


def test_rejects_a_body_that_is_too_long_before_reading_it(server: tuple[str, App]) -> None:
    place = urlparse(server[0])
    with socket.create_connection((place.hostname, place.port), timeout=300) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}\r\n"
        head += f"Content-Length: {1 << 30}\r\n\r\n"
        client.sendall(head.encode() + b"x" * 1000)
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def _body(prompt: str = '"b"', rest: str = "") -> str:
    return f'{{"model": "toy", "prompt": {prompt}{rest}}}'


def _list(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        # Each of these took seconds and a gigabyte for a few megabytes.
        (_body(_list("[1]", 140_000)), "lists and objects"),
        (_body(_list("1", 1_100_000)), "values"),
        (_body(rest=', "x": {' + ",".join(['"a":1'] * 140_000) + "}"), "names"),
        (_body(rest=f', "x": {_list(json.dumps(""), 2_200_000)}'), "values"),
        # The server stops at the first error of a list.
        (_body(rest=f', "stop": {_list("1", 500_000)}'), "stop"),
        (_body(_list("null", 500_000)), "prompt"),
        # Characters within a string are not counted as values.
        (_body(json.dumps('[{:,"' * 300_000 + "\\")), "tokens"),
    ],
)
def test_rejects_bodies_of_too_many_values_immediately(
    server: tuple[str, App], body: str, named: str
) -> None:
    url = server[0] + COMPLETIONS
    for _ in range(2):
        began_s = time.process_time()
        answer = httpx.post(url, content=body.encode(), headers=TYPED, timeout=300)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]
        # The server and its client run in this process.
        assert time.process_time() - began_s < 2


def test_the_size_limit_applies_to_chunked_bodies(server: tuple[str, App]) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * (1 << 19)

    try:
        answer = httpx.post(server[0] + COMPLETIONS, content=parts(), headers=TYPED, timeout=300)
    except httpx.TransportError:
        return  # the connection was closed in the midst of it
    assert answer.status_code == 413


def test_unknown_paths_and_methods(server: tuple[str, App]) -> None:
    for answer, status, word in (
        (httpx.get(server[0] + "/nowhere", timeout=300), 404, "/openapi.json"),
        (httpx.get(server[0] + "/page/../../etc", timeout=300), 404, "no such path"),
        (httpx.get(server[0] + COMPLETIONS, timeout=300), 405, "GET"),
        (httpx.put(server[0] + "/v1/models"), 405, "PUT"),
    ):
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and word in error["message"]
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(("error", "logged"), [("<T>; the handler is closed", 0), ("broken", 1)])
def test_an_answer_to_a_disconnected_client_is_not_logged_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: str, logged: int
) -> None:
    logged_calls: list[object] = []
    monkeypatch.setattr(guards.log, "exception", lambda *words: logged_calls.append(words))

    async def route(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        raise RuntimeError(error)

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS}
    asyncio.run(guards.ErrorHandler(route)(scope, receive, send))
    assert len(logged_calls) == logged


def test_pages_of_a_disconnected_client_are_released() -> None:
    with served(worded(max_seq_len=4096)) as (url, app):
        engine = app.service.engine
        body = {"model": NAME, "prompt": "b", "max_tokens": 4000, "ignore_eos": True}
        for stream in (True, False):
            place = urlparse(url)
            data = json.dumps(body | {"stream": stream}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            with socket.create_connection((place.hostname, place.port), timeout=300) as client:
                client.sendall(head.encode() + data)
                wait_until(lambda: engine.used_pages > 0)
            wait_until(lambda: engine.used_pages == 0 and app.service.open_requests == 0)


def test_a_full_queue_answers_with_retry_after() -> None:
    engine = worded(max_seq_len=4096)
    most = engine.manifest.limits.max_batch_size
    with (
        served(engine, max_queue=0) as (url, app),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        body = {"model": NAME, "prompt": ["b"] * most, "max_tokens": 4000, "ignore_eos": True}
        with client.stream("POST", COMPLETIONS, json=body | {"stream": True}):
            wait_until(lambda: app.service.open_requests == most)
            answer = httpx.post(url + COMPLETIONS, json={"model": NAME, "prompt": "b"}, timeout=300)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        wait_until(lambda: app.service.open_requests == 0)
        assert client.post(COMPLETIONS, json={"model": NAME, "prompt": "b"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        (COMPLETIONS, {"prompt": ["b"] * 1024, "n": 128}, 1024 * 128),
        (COMPLETIONS, {"prompt": ["b"] * 3, "n": 3}, 9),
        (COMPLETIONS, {"prompt": [[1]] * 9, "stream": True}, 9),
        (CHAT, {"messages": HELLO, "n": 9}, 9),
    ],
)
def test_rejects_a_call_with_more_sequences_than_the_server_accepts(
    path: str, body: dict[str, Any], sequences: int
) -> None:
    """An idle server rejects it too, before it tokenizes a prompt."""
    engine = worded(TEMPLATE)
    largest = engine.manifest.limits.max_batch_size + 5
    assert largest == 8
    with served(engine, max_queue=5) as (url, app):
        answer = httpx.post(url + path, json={"model": NAME, **body}, timeout=300)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "too_many_sequences"
        assert f"has {sequences} sequences" in error["message"] and "at most 8" in error["message"]
        assert app.service.open_requests == 0
        fits = {"model": NAME, "prompt": ["b"] * 4, "n": 2, "max_tokens": 1}
        assert httpx.post(url + COMPLETIONS, json=fits, timeout=300).status_code == 200


def test_a_call_counts_each_of_its_sequences_against_the_queue() -> None:
    engine = worded(TEMPLATE, max_seq_len=4096)
    long = {"model": NAME, "prompt": "b", "n": 6, "max_tokens": 4000, "ignore_eos": True}
    with served(engine, max_queue=5) as (url, app), httpx.Client(timeout=300) as client:
        with client.stream("POST", url + COMPLETIONS, json=long | {"stream": True}):
            wait_until(lambda: app.service.open_requests == 6)
            short = {"model": NAME, "n": 3, "prompt": "b", "messages": HELLO, "max_tokens": 1}
            for path in (COMPLETIONS, CHAT):
                answer = httpx.post(url + path, json=short, timeout=300)
                assert answer.status_code == 429, answer.text
                assert "6 sequences are open and this request has 3" in answer.text
            app.service.check_admission(2)  # this call fits
        wait_until(lambda: app.service.open_requests == 0)


def test_a_stream_that_exceeds_its_timeout_ends_with_an_error() -> None:
    with served(worded(max_seq_len=4096)) as (url, app):
        body = {"model": NAME, "prompt": "b", "max_tokens": 4000, "ignore_eos": True}
        late = body | {"stream": True, "timeout": 1.0, "priority": -3}
        with httpx.stream("POST", url + COMPLETIONS, json=late, timeout=300) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        if answer.status_code == 200:  # it had started, as it does unless the machine is very busy
            assert lines.pop() == "[DONE]"
        error = json.loads(lines[-1])["error"]
        assert error["code"] == "deadline_exceeded" and error["type"] == "timeout_error"
        wait_until(lambda: app.service.engine.used_pages == 0 and app.service.open_requests == 0)


def test_keys_and_origins() -> None:
    origin = "https://page.example"
    with served(worded(), keys=("one", "two"), origins=(origin,)) as (url, _):
        body = {"model": NAME, "prompt": "b"}
        for key, status in ((None, 401), ("three", 401), ("one", 200), ("two", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = httpx.post(url + COMPLETIONS, json=body, headers=headers, timeout=300)
            assert answer.status_code == status
        assert httpx.get(url + "/v1/models", timeout=300).status_code == 401
        assert httpx.get(url + "/health", timeout=300).status_code == 200
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(url + COMPLETIONS, headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == origin


def test_closing_finishes_accepted_requests() -> None:
    answers: list[httpx.Response] = []
    with served(worded(max_seq_len=4096)) as (url, app):
        body = {"model": NAME, "prompt": "b", "max_tokens": 150, "ignore_eos": True}

        def ask() -> None:
            answers.append(httpx.post(url + COMPLETIONS, json=body, timeout=300))

        client = threading.Thread(target=ask)
        client.start()
        wait_until(lambda: app.service.open_requests == 1)
    client.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 150


def wait_until(done: Any, seconds: float = 120) -> None:
    end_s = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.005)
