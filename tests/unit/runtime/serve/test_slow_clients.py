"""Clients that send slowly, stall or never read lose their connection, without effect on others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlparse

import httpx
import pytest
from serve.served import NAME, served, worded
from serve.test_bad_input import COMPLETIONS, JSON

from specbuild.runtime.serve import connection
from specbuild.runtime.serve.app import App
from specbuild.runtime.serve.server import Address

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}\r\n"
SHORT_S = 0.4


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, App]]:
    """A server with timeouts of a fraction of a second, and small buffers."""
    listen = Address.listen

    def listening(address: Address) -> socket.socket:
        listener = listen(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return listener

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "HEAD_TIMEOUT_S", SHORT_S)
        patch.setattr(connection, "BODY_TIMEOUT_S", SHORT_S)
        patch.setattr(connection, "BODY_GRACE_S", 0.0)
        patch.setattr(connection, "WRITE_TIMEOUT_S", SHORT_S)
        patch.setattr(Address, "listen", listening)
        with served(worded(max_seq_len=4096)) as started:
            yield started


@contextmanager
def connected(url: str, *, buffer: int | None = None) -> Iterator[socket.socket]:
    place = urlparse(url)
    with socket.socket() as client:
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.settimeout(30)
        client.connect((place.hostname, place.port))
        yield client


def rest_of(client: socket.socket) -> bytes:
    """Return everything that arrives until the server closes the connection."""
    parts = []
    with suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def trickle(client: socket.socket, part: Callable[[int], bytes]) -> int:
    """Send parts until the server answers or disconnects; return how many it read."""
    client.settimeout(0.02)
    for sent in range(1000):
        try:
            client.sendall(part(sent))
            client.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
        except ConnectionError:
            pass
        client.settimeout(30)
        return sent
    raise AssertionError("the server waits for ever")


def error_of(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in head.lower()
    message: str = json.loads(body)["error"]["message"]
    return message


def test_a_silent_connection_is_closed(server: tuple[str, App]) -> None:
    with connected(server[0]) as client:
        assert rest_of(client) == b""


def test_slow_headers_exceed_the_timeout(server: tuple[str, App]) -> None:
    """Further header lines do not restart the timeout."""
    with connected(server[0]) as client:
        client.sendall(HEAD.encode())
        assert trickle(client, lambda i: f"X-{i}: y\r\n".encode()) > 1
        assert "headers did not arrive" in error_of(rest_of(client), 408)


def test_endless_headers_are_rejected(server: tuple[str, App]) -> None:
    with connected(server[0]) as client:
        client.sendall(HEAD.encode() + b"X-Long: " + b"y" * (connection.MAX_HEAD_BYTES + 1))
        assert "64 KiB" in error_of(rest_of(client), 431)


def test_invalid_http_has_an_error_object(server: tuple[str, App]) -> None:
    with connected(server[0]) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert error_of(rest_of(client), 400)


@pytest.mark.parametrize("path", [COMPLETIONS, "/nowhere", "/health"])
def test_a_stalled_body_closes_the_connection(server: tuple[str, App], path: str) -> None:
    """This includes routes that answer without reading the body."""
    with connected(server[0]) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: 100000\r\n\r\n"
        client.sendall(head.encode() + b"{")
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began_s < 30:
                client.sendall(b" ")
                time.sleep(0.02)


def test_empty_lines_do_not_keep_a_connection_open(server: tuple[str, App]) -> None:
    with connected(server[0]) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert trickle(client, lambda _: b"\r\n") > 1


def test_a_connection_serves_several_requests(server: tuple[str, App]) -> None:
    """Each pause is shorter than the timeout; the total is longer."""
    with httpx.Client(base_url=server[0], timeout=300) as client:
        for _ in range(4):
            body = {"model": NAME, "prompt": "b", "max_tokens": 3}
            answer = client.post(COMPLETIONS, json=body, timeout=300)
            assert answer.status_code == 200 and "close" not in answer.headers.get("connection", "")
            time.sleep(SHORT_S / 2)


def test_unread_answers_close_the_connection(server: tuple[str, App]) -> None:
    http_request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    size = len(httpx.get(server[0] + "/openapi.json", timeout=300).content)
    with connected(server[0], buffer=4096) as client:
        client.sendall(http_request * (500_000 // size))
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began_s < 30:
                client.sendall(b"\r\n")
                time.sleep(0.02)
        assert time.monotonic() - began_s > SHORT_S / 2


def test_idle_connections_stay_open_until_a_timeout(server: tuple[str, App]) -> None:
    assert 5 < connection.KEEP_ALIVE_S <= 120
    with connected(server[0]) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(1.5 * SHORT_S)
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
