"""What an answer of a server is worth: an answer, a refusal in OpenAI's form, or a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fuzz.http_requests import BODIES, KEY, MODEL, STORED, Sent, valid_request
from fuzz.http_server import Answer, FuzzedServer, server_of
from fuzz.verdicts import ContradictionError
from specbuild.runtime.errors import SpecbuildError

# What uvicorn says by itself to bytes that are no HTTP.
NO_HTTP = b"Invalid HTTP request received."
_OUTPUTS = ("text", "token_ids", "tokens", "content", "arguments", "finish_reason")
# A client beside the mutant's: what it gets is never another's.
_WITNESS = Sent(
    "witness",
    "/v1/completions",
    body=json.dumps(
        {
            "model": MODEL,
            "temperature": 0,
            "prompt": [3, 1, 4],
            "max_tokens": 12,
            "ignore_eos": True,
            "return_token_ids": True,
        }
    ).encode(),
)


def ask(engine: Path, sent: Sent) -> str:
    """What the server answers while it also serves the witness.

    Raises SpecbuildError with a clean refusal, ContradictionError with a finding.
    """
    server = server_of(engine)
    if server.witnessed is None:
        server.witnessed = _outputs(_answered(server, _WITNESS))
    beside = server.send(_WITNESS)
    answer = _answered(server, sent)
    if _outputs(beside.answer()) != server.witnessed:
        raise ContradictionError("another client's answer changed, by this request or the last")
    found = _judged(server, sent, answer)
    if sent.path in dict(BODIES.values()) and _is_greedy(sent, answer):
        again = _answered(server, sent)
        # A server that was slow was told that the client leaves, and closed.
        if again.status and _outputs(again) != _outputs(answer):
            raise ContradictionError(f"asked again, it says {again.body!r:.150} for {found:.150}")
    return found


def original(engine: Path, base: str) -> str:
    """The answer to a valid request, which is refused for none but a response that is not there."""
    try:
        return ask(engine, valid_request(base))
    except SpecbuildError:
        if not base.startswith(STORED):
            raise
        return "refused"


def _answered(server: FuzzedServer, sent: Sent) -> Answer:
    try:
        return server.send(sent).answer()
    except ContradictionError:
        # A machine that is busy may be silent for a while; a server that stalls does so again.
        return server.send(sent).answer()


def _judged(server: FuzzedServer, sent: Sent, answer: Answer) -> str:
    status, failed = answer.status, server.log()
    if failed:
        raise ContradictionError(f"the server failed: {failed[-400:]}")
    if status == 0:
        raise SpecbuildError("the connection was closed")
    if status < 400:
        if KEY.encode() not in sent.data and b'"finish_reason":"' in answer.body:
            raise ContradictionError("answered without a key")
        return _outputs(answer)
    if status >= 500 and not (status == 504 and b"timeout" in sent.body):
        raise ContradictionError(f"status {status}: {answer.body!r:.300}")
    if answer.body == NO_HTTP or sent.method == "HEAD":
        raise SpecbuildError(f"status {status}")
    raise SpecbuildError(f"status {status}: {_sentence(answer)}")


def _sentence(answer: Answer) -> str:
    """The message of OpenAI's error object."""
    try:
        error = json.loads(answer.body)["error"]
        message = error["message"]
        whole = set(error) == {"message", "type", "param", "code"} and isinstance(message, str)
    except (ValueError, LookupError, TypeError):
        whole = False
    if not whole or "\n" in message or not message.strip():
        raise ContradictionError(f"status {answer.status} is no error object: {answer.body!r:.200}")
    return str(message)


def _is_greedy(sent: Sent, answer: Answer) -> bool:
    """Whether what was asked gives the same tokens again."""
    if answer.status != 200 or sent.raw is not None or "json" not in answer.content_type:
        return False
    try:
        body = json.loads(sent.body)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("temperature", 1) == 0


def _outputs(answer: Answer) -> str:
    """All that a model said in an answer, without names and times."""
    if answer.status != 200:
        return f"{answer.status} {answer.body!r:.200}"
    found: list[str] = []
    for line in answer.body.split(b"\n"):
        try:
            _collect(json.loads(line.removeprefix(b"data: ")), found)
        except (ValueError, RecursionError):
            continue
    return "".join(found)


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in _OUTPUTS and not isinstance(item, dict):
                found.append(json.dumps(item) if isinstance(item, list) else str(item))
            else:
                _collect(item, found)
