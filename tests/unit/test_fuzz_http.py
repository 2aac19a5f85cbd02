"""The fuzzer of a server detects failures, silence, leaks, and invalid formats."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from fuzz import http_server, http_target
from fuzz.http_requests import KEY, Sent, mutated_request, valid_request
from fuzz.http_server import Answer, Exchange
from fuzz.verdicts import ContradictionError

from specbuild.runtime.errors import SpecbuildError

ERROR = {"error": {"message": "no", "type": "t", "param": None, "code": None}}
CHAT = valid_request("chat")


def answered(status: int, body: object) -> Answer:
    return Answer(status, "application/json", json.dumps(body, separators=(",", ":")).encode())


def choice(text: str) -> Answer:
    return answered(200, {"id": "1", "choices": [{"text": text, "finish_reason": "stop"}]})


@dataclass
class Scripted:
    """A server that gives scripted answers to mutants, and others to the witness."""

    answers: list[Answer]
    witness: list[str] = field(default_factory=lambda: ["w"])
    failed: str = ""
    witnessed: str | None = None

    def send(self, sent: Sent) -> Scripted:
        mutant = sent.base != "witness"
        text = self.witness.pop(0) if len(self.witness) > 1 else self.witness[0]
        self._answer = self.answers.pop(0) if mutant else choice(text)
        answer = self._answer
        return type("Sending", (), {"answer": lambda _: answer})()

    def log(self) -> str:
        return self.failed


def asked(monkeypatch: pytest.MonkeyPatch, server: Scripted, sent: Sent = CHAT) -> str:
    monkeypatch.setattr(http_target, "server_of", lambda _: server)
    return http_target.ask(Path("engine"), sent)


@pytest.mark.parametrize(
    ("server", "sent", "result"),
    [
        (Scripted([answered(500, ERROR)]), CHAT, "status 500"),
        (Scripted([answered(503, ERROR)]), CHAT, "status 503"),
        (Scripted([answered(504, ERROR)]), CHAT, "status 504"),
        (Scripted([Answer(404, "text/plain", b"Not Found")]), CHAT, "no error object"),
        (Scripted([answered(400, {"error": {"message": "no"}})]), CHAT, "no error object"),
        (Scripted([choice("a")], failed="Traceback"), CHAT, "the server failed"),
        (Scripted([choice("a"), choice("b")]), CHAT, "asked again"),
        (Scripted([choice("a")], witness=["w", "v"]), CHAT, "another client's"),
        (Scripted([choice("a")]), Sent("chat", "/x", headers=()), "without a key"),
    ],
)
def test_detects_invalid_answers(
    monkeypatch: pytest.MonkeyPatch, server: Scripted, sent: Sent, result: str
) -> None:
    with pytest.raises(ContradictionError, match=result):
        asked(monkeypatch, server, sent)


def test_answers_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, Scripted([choice("a"), choice("a")])) == "astop"
    for answer in (answered(422, ERROR), Answer(0), Answer(400, "", http_target.NO_HTTP)):
        with pytest.raises(SpecbuildError):
            asked(monkeypatch, Scripted([answer]))
    late = Sent("chat", "/x", body=b'{"timeout": 1e-9}')
    with pytest.raises(SpecbuildError, match="status 504"):
        asked(monkeypatch, Scripted([answered(504, ERROR)]), late)


def test_detects_silence_and_completes_a_partial_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_SILENT_S", 0.2)
    actual, desired = socket.socketpair()
    with desired, pytest.raises(ContradictionError, match="silent"):
        Exchange(actual, CHAT).answer()
    actual, desired = socket.socketpair()

    def close_at_the_end() -> None:
        while desired.recv(100):
            pass
        desired.close()

    thread = threading.Thread(target=close_at_the_end)
    thread.start()
    assert Exchange(actual, Sent("chat", "/x", open=True)).answer() == Answer(0)
    thread.join(10)
    actual, desired = socket.socketpair()
    desired.sendall(b"\0\1 not http\r\n\r\n")
    with desired, pytest.raises(ContradictionError, match="no HTTP"):
        Exchange(actual, CHAT).answer()


def test_mutants_are_of_every_kind() -> None:
    mutants = [mutated_request(Random(seed))[0] for seed in range(600)]
    datas = [sent.data for sent in mutants]
    assert len(set(datas)) > 550
    assert any(b"Transfer-Encoding: chunked" in data for data in datas)
    assert any(KEY.encode() not in data for data in datas)
    assert any(b"[" * 1000 in data for data in datas)
    assert any(not _is_utf8(data) for data in datas)
    assert any(not data.partition(b"\r\n\r\n")[1] for data in datas)
    assert mutated_request(Random(3)) == mutated_request(Random(3))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
