"""Ids, log lines and counts of requests, and the accepted hosts and content types."""

from __future__ import annotations

import io
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.served import NAME, TEMPLATE, served, worded
from serve.test_bad_input import CHAT, COMPLETIONS, HELLO, JSON, wait_until

from specbuild.runtime.serve.app import App
from specbuild.runtime.serve.guards import _host_of
from specbuild.runtime.serve.request_record import RequestRecord

BODY = {"model": NAME, "prompt": ["bcd", "e"], "n": 2, "max_tokens": 5, "ignore_eos": True}
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z request_id=(?P<id>\S+) client=(?P<client>\S+) "
    r"method=(?P<method>\S+) route=(?P<route>\S+) status=(?P<status>\d+) "
    r"prompt_tokens=(?P<prompt>\S+) output_tokens=(?P<output>\S+) "
    r"ttft_ms=(?P<ttft>\S+) duration_ms=(?P<duration>[\d.]+)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, App]]:
    with (
        served(worded(TEMPLATE), log_requests=True) as (url, app),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client, app


def standard_error(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Capture standard error from here on. Call this in a test, not in a fixture.

    pytest's capture reads and truncates its file in two steps. It loses a line that the server's
    thread writes in between.
    """
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    return text


def logged(log: io.StringIO, count: int) -> list[dict[str, str]]:
    """Return the lines on standard error in order of status; each of them must match."""
    wait_until(lambda: log.getvalue().count("\n") >= count)
    text = log.getvalue()
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(matches) and len(matches) == count, text
    lines = [match.groupdict() for match in matches if match is not None]
    return sorted(lines, key=lambda line: line["status"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_log_line_has_the_tokens_of_a_request(
    server: tuple[httpx.Client, App], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    client, _ = server
    log = standard_error(monkeypatch)
    client.post(COMPLETIONS, json=BODY | {"stream": stream}, headers={"X-Request-Id": "mine-1"})
    (line,) = logged(log, 1)
    assert (line["id"], line["method"], line["route"]) == ("mine-1", "POST", COMPLETIONS)
    assert (line["status"], line["prompt"], line["output"]) == ("200", "4", "20")
    assert line["client"].startswith("127.0.0.1:")
    assert 0 < float(line["ttft"]) <= float(line["duration"])


def test_refused_requests_are_logged_and_counted(
    server: tuple[httpx.Client, App], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = server
    log = standard_error(monkeypatch)
    client.post(COMPLETIONS, json=BODY | {"n": 0})
    client.get("/nowhere%0aroute=/x%20status=200?secret=1")
    client.put(COMPLETIONS)
    lines = logged(log, 3)
    assert [line["status"] for line in lines] == ["400", "404", "405"]
    assert [line["prompt"] for line in lines] == ["-", "-", "-"]
    assert lines[1]["route"] == "/nowhere%0Aroute=/x%20status=200"
    exported = client.get("/metrics").text
    for labels in (
        f'handler="{COMPLETIONS}",method="POST",status="400"',
        'handler="none",method="GET",status="404"',
    ):
        assert re.search(rf"^http_requests_total{{{labels}}} [1-9]", exported, re.MULTILINE), labels


def test_429s_are_counted() -> None:
    engine = worded(TEMPLATE, max_seq_len=4096)
    most = engine.manifest.limits.max_batch_size
    body = {"model": NAME, "prompt": ["b"] * most, "max_tokens": 4000, "ignore_eos": True}
    with served(engine, max_queue=0) as (url, app), httpx.Client(timeout=300) as client:
        with client.stream("POST", url + COMPLETIONS, json=body | {"stream": True}):
            wait_until(lambda: app.service.open_requests == most)
            refused = httpx.post(url + COMPLETIONS, json={"model": NAME, "prompt": "b"})
            assert refused.status_code == 429
        requests = re.findall(
            r"^http_requests_total{(.*)} (\S+)$", client.get(url + "/metrics").text, re.M
        )
        assert dict(requests)[f'handler="{COMPLETIONS}",method="POST",status="429"'] == "1.0"


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(), st.text())
def test_log_lines_escape_request_data(path: str, host: str, method: str) -> None:
    scope: dict[str, Any] = {"path": path, "client": (host, 1), "method": method or "GET"}
    match = LINE.fullmatch(RequestRecord("a").line(scope, "none"))
    assert match is not None and match["id"] == "a" and match["status"] == "499"


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200) | st.from_regex(rb"[!-~]{1,140}", fullmatch=True))
def test_every_response_has_a_request_id(server: tuple[httpx.Client, App], given_id: bytes) -> None:
    sent = re.sub(rb"[\r\n\0]", b" ", given_id)
    place = urlparse(str(server[0].base_url))
    with socket.create_connection((place.hostname, place.port), timeout=60) as raw:
        raw.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: ")
        raw.sendall(sent + b"\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    (request_id,) = re.findall(rb"\r\nx-request-id: ([^\r]*)\r\n", answer, re.IGNORECASE)
    if re.fullmatch(rb"[A-Za-z0-9!#$%&'*+\-.^_`|~:/=@]{1,128}", sent.strip(b" \t")):
        assert request_id == sent.strip(b" \t")
    else:
        assert re.fullmatch(rb"[0-9a-f]{32}", request_id)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, BODY),
        ("POST", COMPLETIONS, BODY | {"stream": True}),
        ("POST", CHAT, {"model": NAME, "messages": HELLO, "stream": True}),
        ("POST", "/v1/responses", {"model": NAME, "input": "b", "stream": True}),
        ("POST", COMPLETIONS, {"model": "nobody", "prompt": "b"}),
        ("GET", "/nowhere", None),
        ("DELETE", COMPLETIONS, None),
        ("GET", "/metrics", None),
    ],
)
def test_answers_errors_and_streams_have_the_id_of_the_client(
    server: tuple[httpx.Client, App], method: str, path: str, body: dict[str, Any] | None
) -> None:
    headers = {"X-Request-Id": "req_1/a:b"}
    answer = server[0].request(method, path, json=body, headers=headers)
    assert answer.headers.get_list("x-request-id") == ["req_1/a:b"]


def test_an_answer_to_invalid_http_has_an_id(server: tuple[httpx.Client, App]) -> None:
    place = urlparse(str(server[0].base_url))
    with socket.create_connection((place.hostname, place.port), timeout=60) as raw:
        raw.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert b"x-request-id: " in raw.recv(4096)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("text/plain;application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
        (None, 415),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses", "/tokenize"])
def test_rejects_content_types_other_than_json(
    server: tuple[httpx.Client, App], path: str, content_type: str | None, status: int
) -> None:
    """Reject content types that a page of another site may send without a preflight."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    field = b"input" if path == "/v1/responses" else b"prompt"
    content = b'{"model": "toy", "%b": "b"}' % field
    answer = server[0].post(path, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 415:
        assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.:1", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("", 403),
        ("[::2]:8000", 403),
    ],
)
def test_rejects_hosts_that_are_not_allowed(checked: httpx.Client, host: str, status: int) -> None:
    for path in ("/health", "/", "/v1/models"):
        answer = checked.get(path, headers={"Host": host})
        assert answer.status_code == status, (path, answer.text)
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"]


@pytest.fixture(scope="module")
def checked() -> Iterator[httpx.Client]:
    hosts = ("localhost", "127.0.0.1", "[::1]")
    with served(worded(), hosts=hosts) as (url, _), httpx.Client(base_url=url) as client:
        yield client


def test_rejects_requests_with_several_hosts(checked: httpx.Client) -> None:
    place = urlparse(str(checked.base_url))
    for hosts, status in ((b"Host: localhost\r\nHost: evil.example\r\n", b"403"), (b"", b"403")):
        with socket.create_connection((place.hostname, place.port), timeout=60) as raw:
            raw.sendall(b"GET /health HTTP/1.0\r\n" + hosts + b"\r\n")
            assert raw.recv(4096).split(b" ")[1] == status


def test_ipv6_hosts_are_compared_with_brackets() -> None:
    assert _host_of("[2001:DB8::1]:80") == "[2001:db8::1]" == _host_of("[2001:db8::1]")
    assert JSON.endswith("json")
