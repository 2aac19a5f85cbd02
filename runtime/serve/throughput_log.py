"""A line of throughput every few seconds, for a server without Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from specbuild.runtime.background_thread import BackgroundThread
from specbuild.runtime.serve.service import Service

INTERVAL_S = 10.0


@dataclass(frozen=True)
class _Counts:
    """Counters of the server at one moment."""

    time_s: float
    prompt_tokens: float
    output_tokens: float
    steps: float
    accepted: float


class ThroughputLog(BackgroundThread):
    """Writes a line every ``interval_s`` seconds while requests are open; a context manager.

    A line has the numbers of running and waiting requests, the tokens per second since the last
    line, and the used share of the cache. If requests ended, it also has their accepted draft
    tokens per step.
    """

    def __init__(
        self, service: Service, write: Callable[[str], None], interval_s: float = INTERVAL_S
    ) -> None:
        self._service, self._write, self._interval_s = service, write, interval_s
        super().__init__("throughput-log")

    def run(self) -> None:
        """Write the lines."""
        before = self._counts()
        while not self.changed.wait(self._interval_s):
            now = self._counts()
            load = self._service.load
            is_idle = now.output_tokens == before.output_tokens and not load.running + load.waiting
            if not is_idle:
                self._write(self._line(before, now))
            before = now

    def _line(self, before: _Counts, now: _Counts) -> str:
        load, elapsed_s = self._service.load, now.time_s - before.time_s
        prompt = (now.prompt_tokens - before.prompt_tokens) / elapsed_s
        output = (now.output_tokens - before.output_tokens) / elapsed_s
        line = (
            f"requests: {load.running} running, {load.waiting} waiting; prompt {prompt:.1f} "
            f"tokens/s, output {output:.1f} tokens/s; KV cache {100 * load.used_pages:.1f} % used"
        )
        steps = now.steps - before.steps
        if steps:
            line += f"; {(now.accepted - before.accepted) / steps:.2f} accepted draft tokens a step"
        return line

    def _counts(self) -> _Counts:
        value = self._service.metrics.value
        return _Counts(
            time.monotonic(),
            value("vllm:prompt_tokens_total"),
            value("vllm:generation_tokens_total"),
            value("vllm:spec_decode_num_drafts_total"),
            value("vllm:spec_decode_num_accepted_tokens_total"),
        )
