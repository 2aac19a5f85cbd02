"""Lines of ``serve --log-stats``: rates of each interval, and no line without requests."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from specbuild.runtime.serve.service import Load
from specbuild.runtime.serve.throughput_log import ThroughputLog

INTERVAL_S = 0.05


class FakeService:
    """A service whose counters and load a test sets."""

    def __init__(self) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.load = Load(0, 0, 0.0)
        self.metrics = SimpleNamespace(value=self._value)
        self.looks = threading.Semaphore(0)

    def _value(self, name: str) -> float:
        if name == "vllm:spec_decode_num_accepted_tokens_total":
            self.looks.release()  # the last one that a look reads
        return self.counters[name]

    def wait_for_looks(self, count: int) -> None:
        for _ in range(count):
            assert self.looks.acquire(timeout=60)


def test_a_line_has_the_rates_since_the_last_one() -> None:
    service: Any = FakeService()
    lines: list[str] = []
    with ThroughputLog(service, lines.append, INTERVAL_S):
        service.wait_for_looks(3)
        assert lines == [], "nothing runs"
        service.load = Load(2, 1, 0.25)
        service.wait_for_looks(2)
        assert lines, "requests are open"
        service.load = Load(0, 0, 0.0)
        service.wait_for_looks(2)
        lines.clear()
        service.counters["vllm:prompt_tokens_total"] += 400
        service.counters["vllm:generation_tokens_total"] += 100
        service.counters["vllm:spec_decode_num_drafts_total"] += 50
        service.counters["vllm:spec_decode_num_accepted_tokens_total"] += 60
        service.wait_for_looks(3)
    (line,) = lines
    rates = re.fullmatch(
        r"requests: 0 running, 0 waiting; prompt (.*) tokens/s, output (.*) tokens/s; "
        r"KV cache 0.0 % used; 1.20 accepted draft tokens a step",
        line,
    )
    assert rates is not None, line
    prompt, output = map(float, rates.groups())
    assert 0 < output <= 100 / INTERVAL_S
    assert abs(prompt / output - 4) < 0.1
