"""Tests a server under bursts of clients that abort and send invalid data: no request is lost.

Needs the extra ``serve``. The server is a separate process on a free port of this machine. Its
answers are compared with those of the engine offline, and its pages with a replay of its trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from server_process import server_process
from trace_replay import replay

NAME = "engine"
# Shares of requests: aborted, malformed and huge ones; the others run to their end.
KINDS = {"whole": 73, "aborted": 20, "malformed": 5, "huge": 2}
PATIENCE_S = 600.0
BURST = 10


@dataclass(frozen=True)
class Known:
    """A request, and the engine's offline answer."""

    path: str
    body: dict[str, Any]
    text: str
    tokens: int
    finish_reason: str


@dataclass
class Outcome:
    """Counts of requests by kind, and descriptions of incorrect results."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    retries: int = 0
    done: int = 0


class Soak:
    """Sends requests of every kind to a server, one connection each.

    If the queue is full it waits for about ``patience_s``, then for twice as long.
    """

    def __init__(
        self, place: tuple[str, int], known: Sequence[Known], seed: int, patience_s: float = 1.0
    ) -> None:
        self._patience_s = patience_s
        self._place = place
        self._known = known
        self._random = random.Random(seed)
        self.outcome = Outcome()

    async def rounds(self, requests: int, capacity: int, sampled: Callable[[], None]) -> None:
        """Send a burst of ten times ``capacity``, then as many one by one from several clients."""
        while self.outcome.done < requests:
            burst = min(BURST * capacity, requests - self.outcome.done)
            await asyncio.gather(*(self.one() for _ in range(burst)))
            sampled()
            left = min(BURST * capacity, requests - self.outcome.done)
            share = [left // capacity + (i < left % capacity) for i in range(capacity)]
            await asyncio.gather(*(self._client(count) for count in share))
            sampled()

    async def _client(self, requests: int) -> None:
        for _ in range(requests):
            await self.one()

    async def one(self) -> None:
        """Send a request of a random kind."""
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        send: dict[str, Callable[[], Awaitable[str | None]]] = {
            "whole": self._whole,
            "aborted": self._aborted,
            "malformed": self._malformed,
            "huge": self._huge,
        }
        try:
            wrong = await asyncio.wait_for(send[kind](), PATIENCE_S)
        except (OSError, ValueError, KeyError, TimeoutError) as error:
            wrong = f"{kind}: {type(error).__name__}: {error}"
        self.outcome.counts[kind] += 1
        self.outcome.done += 1
        if wrong is not None:
            self.outcome.wrong.append(wrong)

    async def _whole(self) -> str | None:
        """Send a request, again while the queue is full; an accepted one must match offline."""
        known = self._random.choice(self._known)
        streamed = self._random.random() < 0.5
        message = request_of(known.path, known.body | {"stream": streamed})
        for doubled in range(99):
            status, answer = await self.exchange(message)
            if status != 429:
                break
            self.outcome.retries += 1
            patience_s = self._patience_s * 2 ** min(doubled, 4)
            await asyncio.sleep(patience_s * (0.5 + self._random.random()))
        if status != 200:
            return f"whole: {status} {answer[:200]!r}"
        result = answer_of(answer, streamed=streamed)
        requested = (known.text, known.finish_reason)
        if result != requested:
            return f"whole: {json.dumps(known.body)} gave {result}, offline {requested}"
        return None

    async def _aborted(self) -> str | None:
        known = self._random.choice(self._known)
        body = known.body | {"stream": self._random.random() < 0.7}
        reader, writer = await asyncio.open_connection(*self._place)
        message = request_of(known.path, body)
        cut = self._random.randrange(len(message))
        writer.write(message[:cut])
        if self._random.random() < 0.8:
            writer.write(message[cut:])
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(400), self._random.random())
        writer.transport.abort()
        return None

    async def _malformed(self) -> str | None:
        known = self._random.choice(self._known)
        good = json.dumps(known.body).encode()
        body = self._random.choice(
            [
                good[: self._random.randrange(len(good))],
                b"\xff\xfe" + good,
                json.dumps(known.body | {"max_tokens": "many"}).encode(),
                json.dumps(known.body | {"model": "another"}).encode(),
                json.dumps(known.body | {"prompt": [10**9], "messages": 5}).encode(),
                json.dumps(known.body | {"logprobs": "x", "temperature": -1}).encode(),
                b"[" * 1000,
            ]
        )
        return self._refused("malformed", await self.exchange(head_of(known.path, body) + body))

    async def _huge(self) -> str | None:
        path = "/v1/completions"
        if self._random.random() < 0.5:
            head = head_of(path, b"", announced=1 << 30)
            return self._refused("huge", await self.exchange(head + b"x" * 65536))
        body = {"model": NAME, "prompt": "def huge(): " * self._random.randrange(10**4, 2 * 10**5)}
        return self._refused("huge", await self.exchange(request_of(path, body)))

    def _refused(self, kind: str, answered: tuple[int, bytes]) -> str | None:
        status, answer = answered
        if status == 0:
            return None  # the connection was closed
        named = 400 <= status < 500 and json.loads(answer)["error"]["message"]
        return None if named else f"{kind}: {status} {answer[:200]!r}"

    async def exchange(self, message: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer; status 0 if the connection was closed first."""
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            with suppress(ConnectionError):
                writer.write(message)
                await writer.drain()
            try:
                answer = await reader.read()
            except ConnectionError:
                return 0, b""
        finally:
            writer.transport.abort()
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = unchunked(body)
        return (int(head.split(b" ", 2)[1]), body) if head else (0, b"")


def head_of(path: str, body: bytes, announced: int | None = None) -> bytes:
    """Return the head of a request whose answer ends with its connection."""
    size = len(body) if announced is None else announced
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {size}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def unchunked(body: bytes) -> bytes:
    """Return the content of a chunked body. ValueError if its end is missing."""
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            return b"".join(parts)
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]


def request_of(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    return head_of(path, data) + data


def answer_of(answer: bytes, *, streamed: bool) -> tuple[str, str]:
    """Return text and finish reason of a completion or a chat."""
    if not streamed:
        choice = json.loads(answer)["choices"][0]
        return text_of(choice, "message"), choice["finish_reason"]
    lines = [line for line in answer.decode().split("\n\n") if line]
    if lines.pop() != "data: [DONE]":
        raise ValueError("a stream does not end with [DONE]")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    return "".join(text_of(choice, "delta") for choice in choices), choices[-1]["finish_reason"]


def text_of(choice: dict[str, Any], place: str) -> str:
    """Return the text of a choice, or of a part of one."""
    return choice["text"] if "text" in choice else choice[place].get("content") or ""


def known_answers(engine: Path, count: int, seed: int) -> list[Known]:
    """Return requests of mixed sizes, greedy and sampled, and the engine's own answers."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
    from specbuild.runtime.sampling import SamplingParams

    drawn, loaded = random.Random(seed), Engine.load(engine)
    words = ["def", "area", "self", "return", "import", "os", "class", "for", "in", "print", "1"]
    prompts, params, bodies = [], [], []
    for i in range(count):
        text = " ".join(drawn.choices(words, k=drawn.choice([1, 4, 12, 60])))
        args = GenerateParams(
            max_new_tokens=drawn.choice([1, 2, 8, 32]),
            sampling=SamplingParams(temperature=drawn.choice([0.0, 1.0]), seed=i),
            raw=True,
        )
        prompts.append(Prompt(str(i), prompt=text))
        params.append(args)
        body = {"model": NAME, "prompt": text, "max_tokens": args.max_new_tokens}
        bodies.append(body | {"temperature": args.sampling.temperature, "seed": i})
    events = loaded.generate(prompts, params)
    ended = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [
        Known(
            "/v1/completions",
            body,
            ended[i].text or "",
            len(ended[i].output_ids),
            "length" if ended[i].finish_reason == "length" else "stop",
        )
        for i, body in enumerate(bodies)
    ]


@contextmanager
def server(
    engine: Path, max_queue: int, trace: Path
) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """Return the server's process, and its host and port."""
    options = ("--served-model-name", NAME, "--max-queue", str(max_queue), "--trace", str(trace))
    with server_process(engine, *options) as (process, url):
        host, _, port = url.rpartition("/")[2].rpartition(":")
        yield process, (host, int(port))


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if "VmRSS" in line).split()[1])


async def settled(soak: Soak) -> dict[str, float]:
    """Return the gauges of the server when nothing runs, at most a minute later."""
    gauges: dict[str, float] = {}
    for _ in range(60):
        _, answer = await soak.exchange(
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        lines = answer.decode().splitlines()
        gauges = {
            name: float(line.rsplit(" ", 1)[1])
            for name in names
            for line in lines
            if line.startswith(f"vllm:{name}{{")
        }
        if not any(gauges.values()):
            break
        await asyncio.sleep(1)
    return gauges


def main() -> None:
    """Print one JSON object; the exit code is 1 if a result is incorrect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", metavar="N", type=int, default=10_000)
    parser.add_argument("--max-queue", metavar="N", type=int, default=16)
    parser.add_argument("--known", metavar="N", type=int, default=400)
    parser.add_argument("--seed", metavar="S", type=int, default=1)
    args = parser.parse_args()
    known = known_answers(args.engine, args.known, args.seed)
    batch = json.loads((args.engine / "manifest.json").read_text())["limits"]["max_batch_size"]
    memory: list[tuple[int, int]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        server(args.engine, args.max_queue, Path(folder) / "trace") as (process, place),
    ):
        soak, started_s = Soak(place, known, args.seed), time.perf_counter()

        def sampled() -> None:
            memory.append((soak.outcome.done, rss_bytes(process.pid)))
            print(soak.outcome.done, memory[-1][1] >> 20, "MiB", file=sys.stderr, flush=True)

        async def all_of_it() -> dict[str, float]:
            await soak.rounds(args.requests, batch + args.max_queue, sampled)
            return await settled(soak)

        gauges, passed_s = asyncio.run(all_of_it()), time.perf_counter() - started_s
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        with (Path(folder) / "trace").open() as lines:
            traced = replay(lines)
    half = [rss for done, rss in memory if done >= args.requests / 2]
    tail = mean(half[-max(1, len(half) // 4) :])
    result = {
        "requests": dict(soak.outcome.counts),
        "sent_again_after_429": soak.outcome.retries,
        "wrong": len(soak.outcome.wrong),
        "first_wrong": soak.outcome.wrong[:5],
        "passed_s": round(passed_s, 1),
        "gauges_at_the_end": gauges,
        "exit_code": code,
        "trace": {"events": dict(traced.events), "most_held": traced.most_held},
        "rss_mib": [round(rss / 2**20, 1) for _, rss in memory],
        "rss_growth_over_the_last_half": round(tail / half[0] - 1, 4),
    }
    print(json.dumps(result, indent=1))
    sane = not soak.outcome.wrong and code == 0 and not any(gauges.values())
    sys.exit(0 if sane and tail <= 1.03 * half[0] else 1)


if __name__ == "__main__":
    main()
