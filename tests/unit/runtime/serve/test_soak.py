"""Sixty requests in bursts, including aborted, malformed and very large ones; stalled clients."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest
from serve.lettered import lettered_engine
from serve.served import NAME, served, worded
from serve.test_bad_input import COMPLETIONS, JSON, wait_until
from serve.test_routes import text_of
from toy_model import decode_plainly

from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
from hostile_soak import EXPECTED, HostileSoak, hostile_requests, report
from serve_soak import KINDS, Known, Soak
from trace_replay import replay

EOS = 28


def known_answer(seed: int) -> Known:
    """Return a request to the toy model, and its tokens when it runs alone."""
    drawn = random.Random(seed)
    ids, tokens = drawn.choices(range(20), k=drawn.randint(1, 30)), drawn.randint(1, 20)
    sampling = SamplingParams(temperature=drawn.choice([0.0, 1.0]), seed=seed)
    plain = decode_plainly(ids, tokens, sampling)
    body = {"model": NAME, "prompt": ids, "max_tokens": tokens}
    body |= {"temperature": sampling.temperature, "seed": seed}
    reason = "stop" if plain[-1] == EOS else "length"
    return Known(COMPLETIONS, body, text_of(plain), len(plain), reason)


def test_a_small_soak_loses_no_request(tmp_path: Path) -> None:
    engine, file = worded(), tmp_path / "trace.jsonl"
    with PageTrace(file) as trace:
        engine.trace_pages(trace)
        with served(engine, max_queue=3) as (url, app):
            place = urlparse(url)
            assert place.hostname is not None and place.port is not None
            requests_and_tokens = [known_answer(i) for i in range(20)]
            soak = Soak((place.hostname, place.port), requests_and_tokens, 1, patience_s=0.05)
            asyncio.run(soak.rounds(60, 5, lambda: None))
            wait_until(lambda: engine.used_pages == 0 and app.service.open_requests == 0)
    assert soak.outcome.wrong == []
    assert soak.outcome.counts.total() == 60 and set(soak.outcome.counts) == set(KINDS)
    assert replay(file.read_text().splitlines()).events["finish"] >= soak.outcome.counts["whole"]


def test_stalled_clients_do_not_delay_others() -> None:
    """Half of the headers or the body, an unread stream: each occupies its own connection."""
    with served(worded(max_seq_len=4096)) as (url, app), ExitStack() as open_ones:
        place = urlparse(url)
        body = json.dumps({"model": NAME, "prompt": "b", "max_tokens": 4000, "ignore_eos": True})
        unread = body[:-1] + ', "stream": true, "logprobs": 0}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: "
        sent = [head[:20], f"{head}{len(body)}\r\n\r\n{body[:30]}"] * 10
        for text in [*sent, f"{head}{len(unread)}\r\n\r\n{unread}"]:
            client = socket.create_connection((place.hostname, place.port), timeout=300)
            open_ones.enter_context(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(text.encode())
        wait_until(lambda: app.service.open_requests == 1)
        for _ in range(3):
            fields = {"model": NAME, "prompt": "b", "max_tokens": 3}
            assert httpx.post(url + COMPLETIONS, json=fields, timeout=300).status_code == 200
        assert httpx.get(url + "/health", timeout=300).status_code == 200
        open_ones.close()
        wait_until(lambda: app.service.engine.used_pages == 0 and app.service.open_requests == 0)


def test_hostile_requests_do_not_change_answers_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run a short script; its latency limits assume a quiet machine."""
    lines: list[str] = []
    requests = hostile_requests(300)
    with served(lettered_engine(monkeypatch), max_queue=8) as (url, app):
        soak = HostileSoak(url, NAME, requests)
        soak.run(0.5, quiet_s=0.2)
        wait_until(lambda: app.service.open_requests == 0)
    report(soak.outcome, lines.append)
    assert soak.outcome.wrong == [] and soak.outcome.loaded_s, lines
    assert {name for name, _ in soak.outcome.statuses} == set(requests)
    assert {status for _, status in soak.outcome.statuses} <= EXPECTED, lines
    refused = {name for name, status in soak.outcome.statuses if status == 400}
    assert {"chained references", "chained rules"} <= refused
