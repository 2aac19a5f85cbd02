"""A sample of the requests that `make fuzz` sends, to a toy engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fuzz import http_server, http_target
from fuzz.http_requests import BODIES, mutated_request
from fuzz.http_server import FuzzedServer
from fuzz.verdicts import FINDING, judged
from serve.served import TEMPLATE, worded

MUTANTS = 60
NOWHERE = Path("no file is read")


def test_mutated_requests_cause_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WAITS_S", 0.05)
    server = FuzzedServer(worded(TEMPLATE))
    monkeypatch.setattr(http_target, "server_of", lambda _: server)
    for base in BODIES:
        http_target.original(NOWHERE, base)
    verdicts: Counter[str] = Counter()
    for seed in range(MUTANTS):
        sent, change = mutated_request(Random(seed))
        verdict = judged(lambda sent=sent: http_target.ask(NOWHERE, sent), None, lambda *_: True)
        assert verdict.verdict != FINDING, (seed, sent.base, change, verdict.reason)
        verdicts[verdict.verdict] += 1
    assert len(verdicts) == 2, verdicts
