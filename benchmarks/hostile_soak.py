"""Measures the latency of a client while others send requests that try to stop the server.

``python benchmarks/hostile_soak.py ENGINE --seconds 600`` starts a server and sends a short greedy
request repeatedly: first alone, then while hostile clients send their requests. These are guides
that nest too deeply, take minutes to compile, or have slow masks; responses with large metadata;
and one call that requests many sequences. The exit code is 1 if an answer differs or fails, if the
median latency is more than twice that without attack, or if a hostile request ends in anything
except an answer or a refusal.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from server_process import server_process

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
# Statuses of a healthy server: answers and refusals, but no failures.
EXPECTED = {200, 400, 413, 422, 429, 503}
MAX_RATIO = 2.0
_TIMEOUT_S = 120


@dataclass
class Outcome:
    """Latencies of the normal client, and statuses of the hostile requests by name."""

    quiet_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """The median latency under attack, relative to that without."""
        return statistics.median(self.loaded_s) / statistics.median(self.quiet_s)


def hostile_requests(size: int = 3000) -> dict[str, tuple[str, dict[str, Any]]]:
    """Paths and bodies by name; guides have ``size`` definitions, texts grow with it."""
    completion = {"prompt": "x", "max_tokens": 4}
    references: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(size)}
    schema = {"$defs": references | {f"a{size}": {"type": "string"}}, "$ref": "#/$defs/a0"}
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(size))
    slow = "\n".join(f'b{i} ::= b{i + 1} | "x"' for i in range(3 * size))
    doubled = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20))
    guides: dict[str, Any] = {
        "chained references": {"guided_json": schema},
        "chained rules": {"guided_grammar": f'start: r0\n{rules}\nr{size}: "b"'},
        "slow to convert": {"guided_grammar": f'root ::= b0\n{slow}\nb{3 * size} ::= "y"'},
        "long choice": {"guided_choice": ["x" + "ab " * 22 * size]},
        "doubled rules": {"guided_grammar": f'start: "x" r0\n{doubled}\nr20: "abcdefgh"'},
    }
    requests = {name: (COMPLETIONS, completion | guide) for name, guide in guides.items()}
    metadata = {"a": "x" * (10_000 * size)}
    response = {"input": "x", "max_output_tokens": 1, "metadata": metadata}
    many = {"prompt": ["x"] * 1024, "n": 128, "max_tokens": 4000, "ignore_eos": True}
    return requests | {
        "large metadata": (RESPONSES, response),
        "many sequences": (COMPLETIONS, many),
    }


class HostileSoak:
    """Clients of one server: a normal one, and ``attackers`` threads of hostile ones."""

    def __init__(
        self, url: str, model: str, requests: dict[str, tuple[str, dict[str, Any]]]
    ) -> None:
        self.outcome = Outcome()
        self._place = urlparse(url)
        self._model = model
        self._requests = requests
        self._ends_s = 0.0
        self._answer: Any = None

    def run(self, seconds: float, *, attackers: int = 2, quiet_s: float = 10) -> None:
        """Measure the normal client alone, then for ``seconds`` together with the hostile ones."""
        # The first requests load what later ones use.
        self._normal(time.monotonic() + min(quiet_s, 2), [])
        self._normal(time.monotonic() + quiet_s, self.outcome.quiet_s)
        self._ends_s = time.monotonic() + seconds
        threads = [threading.Thread(target=self._attack, args=(i,)) for i in range(attackers)]
        for thread in threads:
            thread.start()
        self._normal(self._ends_s, self.outcome.loaded_s)
        for thread in threads:
            thread.join()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return a status and the answer; status 0 if the server closed the connection."""
        assert self._place.hostname is not None
        connection = http.client.HTTPConnection(
            self._place.hostname, self._place.port, timeout=_TIMEOUT_S
        )
        data = json.dumps({"model": self._model, **body}).encode()
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def _normal(self, ends_s: float, latencies_s: list[float]) -> None:
        """Send the short request at least once, and until the time is over."""
        body = {"prompt": "def", "max_tokens": 16, "temperature": 0}
        while True:
            started_s = time.monotonic()
            status, answer = self.post(COMPLETIONS, body)
            latencies_s.append(time.monotonic() - started_s)
            text = answer["choices"] if status == 200 else answer
            self._answer = text if self._answer is None else self._answer
            if status != 200 or text != self._answer:
                self.outcome.wrong.append(f"{status}: {text}")
            if time.monotonic() >= ends_s:
                return

    def _attack(self, first: int) -> None:
        """Send every hostile request in turn, from a different start per attacker."""
        names = list(self._requests)
        round_index = first
        while round_index < first + len(names) or time.monotonic() < self._ends_s:
            name = names[round_index % len(names)]
            status, _ = self.post(*self._requests[name])
            self.outcome.statuses[name, status] += 1
            round_index += 1


def report(outcome: Outcome, tell: Callable[[str], None] = print) -> bool:
    """Print the results; return whether all are as required."""
    for name, latencies_s in (("quiet", outcome.quiet_s), ("under attack", outcome.loaded_s)):
        ordered = sorted(latencies_s)
        tell(
            f"{name}: {len(ordered)} requests, median {statistics.median(ordered) * 1e3:.0f} ms, "
            f"95 % {ordered[int(0.95 * (len(ordered) - 1))] * 1e3:.0f} ms, "
            f"longest {ordered[-1] * 1e3:.0f} ms"
        )
    tell(f"median under attack by quiet median: {outcome.ratio:.2f} (at most {MAX_RATIO:g})")
    for (name, status), count in sorted(outcome.statuses.items()):
        tell(f"{name}: {count} times status {status}")
    for wrong in outcome.wrong[:10]:
        tell(f"wrong: {wrong}")
    unexpected = [status for _, status in outcome.statuses if status not in EXPECTED]
    return not outcome.wrong and not unexpected and outcome.ratio <= MAX_RATIO


def main(words: Sequence[str] | None = None) -> int:
    """Run the soak against its own server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quiet-seconds", type=float, default=20)
    parser.add_argument("--attackers", type=int, default=2, help="hostile clients at once")
    arguments = parser.parse_args(words)
    with server_process(arguments.engine, "--served-model-name", "soaked") as (process, url):
        soak = HostileSoak(url, "soaked", hostile_requests())
        soak.run(arguments.seconds, attackers=arguments.attackers, quiet_s=arguments.quiet_seconds)
        alive = process.poll() is None
    print("the server is alive" if alive else "the server has ended")
    return 0 if report(soak.outcome) and alive else 1


if __name__ == "__main__":
    raise SystemExit(main())
