"""Measure a server under many streams: tokens/s, TPOT, TTFT and processor time.

Clients are distributed over processes, read raw bytes and count events, so that they use little
processor time. Each sends its next request when the previous one has ended. The server implements
OpenAI's API; ``--pid`` is its process, whose processor time is read from /proc.

    python benchmarks/serve_load.py http://127.0.0.1:8000 --pid 4711 --clients 32 --requests 128
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen


@dataclass(frozen=True)
class Sample:
    """A request, in seconds of the machine's monotonic clock. ``events`` is 0 after an error."""

    began_s: float
    first_s: float
    last_s: float
    events: int
    error: str = ""


@dataclass(frozen=True)
class Load:
    """What each client sends, and how often."""

    host: str
    port: int
    model: str
    tokens: int
    prompt_tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()
    chat: bool = False


def request_of(load: Load, seed: int) -> bytes:
    """A streamed completion of random ids, or of one of the prompts; or a chat of such numbers."""
    if load.prompts:
        prompt = list(load.prompts[seed % len(load.prompts)])
    else:
        prompt = random.Random(seed).choices(range(300, 1000), k=load.prompt_tokens)
    route, content = "completions", {"prompt": prompt}
    if load.chat:
        message = {"role": "user", "content": " ".join(map(str, prompt))}
        route, content = "chat/completions", {"messages": [message]}
    body = {
        "model": load.model,
        **content,
        "max_tokens": load.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/{route} HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Sample:
    """One request over a connection that stays open."""
    began_s = time.monotonic()
    writer.write(request)
    events, first_s, last_s, tail, status = 0, 0.0, 0.0, b"", b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            return Sample(began_s, first_s, last_s, 0, f"the connection closed: {tail[-200:]!r}")
        now_s = time.monotonic()
        if not status:
            status = data.split(b"\r\n", 1)[0]
            if b" 200 " not in status:
                return Sample(began_s, now_s, now_s, 0, data[:300].decode(errors="replace"))
        count = (tail[-8:] + data).count(b"data: {") - tail[-8:].count(b"data: {")
        if count:
            first_s = first_s or now_s
            last_s, events = now_s, events + count
        tail = (tail + data)[-64:]
    return Sample(began_s, first_s, last_s, events)


async def client(load: Load, seeds: list[int]) -> list[Sample]:
    """The requests of one client, one after the other."""
    samples = []
    reader, writer = await asyncio.open_connection(load.host, load.port)
    for seed in seeds:
        samples.append(await ask(reader, writer, request_of(load, seed)))
        if samples[-1].error:
            break
    writer.close()
    return samples


def clients(load: Load, seeds: list[list[int]]) -> list[Sample]:
    """All clients of one process."""

    async def run() -> list[list[Sample]]:
        return await asyncio.gather(*(client(load, own) for own in seeds))

    return [sample for own in asyncio.run(run()) for sample in own]


def processor_s(pid: int) -> float:
    """The processor time of a process and of its threads."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def spread_ms(values_s: list[float]) -> dict[str, float]:
    """Median, mean and 99th percentile, in milliseconds."""
    p99 = quantiles(values_s, n=100)[98] if len(values_s) > 1 else values_s[0]
    spread = {"p50": median(values_s), "mean": mean(values_s), "p99": p99}
    return {name: round(1e3 * value, 3) for name, value in spread.items()}


def measure(
    load: Load, count: int, requests: int, processes: int, pid: int | None
) -> dict[str, Any]:
    """The figures of one load. Raises SystemExit if a request fails or loses an event."""
    seeds = [list(range(i, requests, count)) for i in range(count)]
    parts = [seeds[i::processes] for i in range(min(processes, count))]
    with ProcessPoolExecutor(len(parts)) as pool:
        list(pool.map(time.monotonic, ()))
        before_s, began_s = processor_s(pid) if pid else 0.0, time.monotonic()
        done = [s for part in pool.map(clients, [load] * len(parts), parts) for s in part]
        took_s = time.monotonic() - began_s
        used_s = processor_s(pid) - before_s if pid else None
    errors = [sample.error for sample in done if sample.error]
    if errors or len(done) != requests:
        raise SystemExit(f"{len(errors)} of {requests} requests failed: {errors[:1]}")
    events = sum(sample.events for sample in done)
    # The steady part: all clients have begun, and none has left.
    tpot_s = [(s.last_s - s.first_s) / (load.tokens - 1) for s in done]
    figures: dict[str, Any] = {
        "clients": count, "requests": requests, "tokens": load.tokens,
        "prompt_tokens": load.prompt_tokens, "processes": len(parts),
        "seconds": round(took_s, 3), "events": events,
        "output_tokens_per_s": round(requests * load.tokens / took_s, 1),
        "tpot_ms": spread_ms(tpot_s),
        "ttft_ms": spread_ms([s.first_s - s.began_s for s in done]),
    }  # fmt: skip
    if used_s is not None:
        per_token_s = used_s / (requests * load.tokens)
        figures["server_cpu_s_per_1000_tokens"] = round(1000 * per_token_s, 5)
    return figures


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, help="the server's process, for its processor time")
    parser.add_argument("--clients", metavar="N", type=int, default=32)
    parser.add_argument("--requests", metavar="N", type=int, default=128)
    parser.add_argument("--tokens", metavar="N", type=int, default=256)
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=128)
    parser.add_argument("--prompts", type=Path, help="lines of JSON with prompt_ids, as of synth")
    parser.add_argument("--processes", metavar="N", type=int, default=8)
    parser.add_argument("--chat", action="store_true", help="chats, whose text has more tokens")
    args = parser.parse_args()
    address = urlsplit(args.url)
    lines = args.prompts.read_text().splitlines() if args.prompts else []
    with urlopen(f"{args.url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    load = Load(
        address.hostname or "127.0.0.1",
        address.port or 80,
        model,
        args.tokens,
        args.prompt_tokens,
        tuple(tuple(json.loads(line)["prompt_ids"]) for line in lines),
        args.chat,
    )
    figures = measure(load, args.clients, args.requests, args.processes, args.pid)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
