"""Requests to a server, as bytes: valid ones of every route, and their mutants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fuzz.byte_mutators import mutated_bytes
from fuzz.guides import hostile_guide
from fuzz.json_mutators import mutated_json

MODEL, KEY = "fuzzed", "5ecret"
_GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "seed": 7}
_MESSAGES = [{"role": "user", "content": "the quick"}]
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
# A body for each route and way of asking; others have none.
BODIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completion": (
        "/v1/completions",
        {**_GREEDY, "prompt": "the quick", "max_tokens": 4, "n": 1, "logprobs": 2,
         "stop": ["fox"], "logit_bias": {"5": 1.5}, "user": "me"},
    ),
    "completion of ids": (
        "/v1/completions",
        {**_GREEDY, "prompt": [[5, 9, 3], [7]], "max_tokens": 3, "top_k": 4, "top_p": 0.9,
         "min_p": 0.1, "repetition_penalty": 1.1, "echo": True,
         "ignore_eos": True, "return_token_ids": True},
    ),
    "completion stream": (
        "/v1/completions",
        {**_GREEDY, "prompt": "the", "max_tokens": 4, "stream": True, "return_draft_tokens": True,
         "stream_options": {"include_usage": True}, "priority": 1, "timeout": 100},
    ),
    "chat": (
        "/v1/chat/completions",
        {**_GREEDY, "messages": _MESSAGES, "max_completion_tokens": 4, "logprobs": True,
         "top_logprobs": 2, "presence_penalty": 0.5, "min_tokens": 1, "cache_salt": "mine"},
    ),
    "chat with tools": (
        "/v1/chat/completions",
        {**_GREEDY, "messages": [{"role": "system", "content": "be brief"}, *_MESSAGES,
         {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function",
          "function": {"name": "look", "arguments": "{}"}}]},
         {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}]}],
         "max_tokens": 3, "tools": [_TOOL], "tool_choice": "auto", "stream": True},
    ),
    "response": (
        "/v1/responses",
        {**_GREEDY, "input": [{"role": "user", "content": [{"type": "input_text", "text": "the"}]}],
         "instructions": "be brief", "max_output_tokens": 3, "store": True, "metadata": {"a": "b"}},
    ),
    "response stream": (
        "/v1/responses", {**_GREEDY, "input": "the quick", "max_output_tokens": 3, "stream": True},
    ),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "the quick", "add_special_tokens": True}),
    "tokenize a chat": ("/tokenize", {"model": MODEL, "messages": _MESSAGES}),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": [5, 9, 3]}),
}  # fmt: skip
STORED = "/v1/responses/"
_GET = (
    "/v1/models", f"/v1/models/{MODEL}", "/health", "/ping", "/load", "/version", "/metrics",
    "/openapi.json", "/", f"{STORED}resp_1",
)  # fmt: skip
_ODD_PATHS = (
    "/%00", "/%ff", "/..", "/v1/../metrics", "//", "/page/../../../etc/passwd", "/page/%2e%2e/app",
    "/v1/models/%2F..%2F", "/" + "a" * 9000, "*", "http://elsewhere/v1/models", "/?" + "x=1&" * 999,
    "/v1/responses/" + "r" * 3000, "/\x1b[2J", "",
)  # fmt: skip
_METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI", "post", "P" * 999)
_LENGTHS = (
    "-1", "0", "1", "10", "+5", "0x10", "1e3", "99999", str(2**31), str(2**64), "9" * 99, "",
)  # fmt: skip
_ODD_HEADERS = (
    ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip, chunked"), ("Host", ""),
    ("Transfer-Encoding", "identity"), ("Expect", "100-continue"), ("Content-Encoding", "gzip"),
    ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("X", "y" * 70_000),
    ("Authorization", "Bearer"), ("Authorization", "Basic " + "A" * 999), ("A\0b", "c"),
    ("Content-Type", "text/xml"), ("Content-Type", "application/json; charset=utf-16"),
    ("Origin", "https://elsewhere"), ("X-Forwarded-For", "\xff\xfe"), (" Content-Length", "5"),
    ("Content-Length", "5"), ("Range", "bytes=0-"), ("Cookie", "a=b; " * 500),
)  # fmt: skip
_CHUNK_SIZES = (
    b"0", b"-1", b"ffffffffffffffff", b"zz", b"", b"5;name=value", b"0" * 999, b"7fffffff",
)  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A request as it goes over the wire.

    ``base``: the valid request that it was, whose answer it is held against. ``open``: it may be
    that the server waits for more of it, so that the client is to say that there is none.
    """

    base: str
    path: str
    method: str = "POST"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = field(
        default=(
            ("Host", "127.0.0.1"),
            ("Authorization", f"Bearer {KEY}"),
            ("Content-Type", "application/json"),
        )
    )
    open: bool = False
    raw: bytes | None = None

    @property
    def data(self) -> bytes:
        """The bytes."""
        if self.raw is not None:
            return self.raw
        headers = self.headers
        named = {name.strip().lower() for name, _ in headers}
        if not named & {"content-length", "transfer-encoding"} and self.method == "POST":
            headers = (*headers, ("Content-Length", str(len(self.body))))
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{n}: {v}" for n, v in headers)]
        head = "".join(f"{line}\r\n" for line in lines) + "\r\n"
        return head.encode("latin-1", "replace") + self.body


def valid_request(base: str) -> Sent:
    """A request of BODIES, or one without a body by its path."""
    if base not in BODIES:
        return Sent(base, base, "GET")
    path, body = BODIES[base]
    return Sent(base, path, body=json.dumps(body, separators=(",", ":")).encode())


def mutated_request(random: Random) -> tuple[Sent, str]:
    """A request that is none, or asks for something else, and what was changed."""
    base = random.choice(list(BODIES)) if random.random() < 0.9 else random.choice(_GET)
    sent = valid_request(base)
    changes = _CHANGES if sent.body else _CHANGES_WITHOUT_BODY
    weights = [weight for weight, _ in changes]
    _, change = random.choices(changes, weights)[0]
    changed, what = change(random, sent)
    return changed, what


def _json(random: Random, sent: Sent) -> tuple[Sent, str]:
    body, what = mutated_json(random, sent.body, random.choice((1, 1, 1, 2)))
    return replace(sent, body=body), what


def _guide(random: Random, sent: Sent) -> tuple[Sent, str]:
    """A guide that is made to stop the server, in a request for text."""
    (name, guide), what = hostile_guide(random)
    fields = {**_GREEDY, "prompt": "the quick", "max_tokens": 4, name: guide}
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return replace(sent, path="/v1/completions", body=body), f"guide: {what}"


def _bytes(random: Random, sent: Sent) -> tuple[Sent, str]:
    body, what = mutated_bytes(random, sent.body)
    return replace(sent, body=body), f"body: {what}"


def _chunked(random: Random, sent: Sent) -> tuple[Sent, str]:
    """The body in chunks, some of which say another size."""
    cut = random.randrange(len(sent.body) + 1)
    parts = []
    wrong = random.random() < 0.7
    for part in (sent.body[:cut], sent.body[cut:], b""):
        size = random.choice(_CHUNK_SIZES) if wrong and random.random() < 0.4 else b"%x" % len(part)
        if part or size == b"0":
            parts.append(size + b"\r\n" + part + b"\r\n")
    ended = random.random() < 0.8
    body = b"".join(parts) + (b"0\r\n\r\n" if ended else b"")
    headers = (*sent.headers, ("Transfer-Encoding", "chunked"))
    return replace(sent, body=body, headers=headers, open=True), "chunks"


def _length(random: Random, sent: Sent) -> tuple[Sent, str]:
    length = random.choice(_LENGTHS)
    headers = (*sent.headers, ("Content-Length", length))
    return replace(sent, headers=headers, open=True), f"Content-Length: {length}"


def _header(random: Random, sent: Sent) -> tuple[Sent, str]:
    name, value = random.choice(_ODD_HEADERS)
    kept = [h for h in sent.headers if random.random() < 0.8]
    return replace(sent, headers=(*kept, (name, value)), open=True), f"{name}: {value}"[:80]


def _path(random: Random, sent: Sent) -> tuple[Sent, str]:
    path = random.choice((*_ODD_PATHS, *_GET, *(path for path, _ in BODIES.values())))
    return replace(sent, path=path, open=True), f"path {path[:60]!r}"


def _method(random: Random, sent: Sent) -> tuple[Sent, str]:
    method = random.choice(_METHODS)
    return replace(sent, method=method, open=True), f"method {method[:20]}"


def _cut(random: Random, sent: Sent) -> tuple[Sent, str]:
    data = sent.data
    at = random.randrange(len(data))
    return replace(sent, raw=data[:at], open=True), f"cut at {at}"


def _wire(random: Random, sent: Sent) -> tuple[Sent, str]:
    data, what = mutated_bytes(random, sent.data)
    return replace(sent, raw=data, open=True), f"wire: {what}"


def _twice(random: Random, sent: Sent) -> tuple[Sent, str]:
    """Another request behind it, whole or not, in the same bytes."""
    other = valid_request(random.choice(list(BODIES))).data
    other = other[: random.randrange(len(other))] if random.random() < 0.5 else other
    return replace(sent, raw=sent.data + other, open=True), "two requests"


Change = Callable[[Random, Sent], tuple[Sent, str]]
_CHANGES_WITHOUT_BODY: tuple[tuple[int, Change], ...] = (
    (3, _header), (4, _path), (3, _method), (2, _cut), (4, _wire), (1, _length), (1, _twice),
)  # fmt: skip
_CHANGES: tuple[tuple[int, Change], ...] = (
    (30, _json), (10, _guide), (10, _bytes), (4, _chunked), *_CHANGES_WITHOUT_BODY,
)  # fmt: skip
