"""The default draft of a fresh server, against a server without a draft and fixed chains.

All requests are streamed completions with ``ignore_eos``, of the prompts beside a synthetic engine.
The engine needs no ``tune``; its default draft begins with the first request of its server:

    specbuild synth --geometry gpt-oss-20b --draft --acceptance 0 --engine e --backend cuda
    python benchmarks/served_drafts.py e --clients 1 --clients 16

A line has the tokens per second and client behind the first token: of the first 256 tokens of an
output, and of those behind its first 200. A second round of the same requests follows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from server_process import server_process

FIRST, SKIPPED = 256, 200
ROUNDS = 2
Arrivals = list[tuple[float, int]]


def request_body(ids: Sequence[int], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """A streamed completion that counts its tokens in every chunk."""
    return {
        "model": "engine",
        "prompt": list(ids),
        "max_tokens": args.tokens,
        "temperature": args.temperature,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def arrivals(http: httpx.AsyncClient, body: dict[str, Any]) -> Arrivals:
    """The time of each chunk and the number of tokens until then."""
    chunks: Arrivals = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                chunks.append((now, json.loads(line[6:])["usage"]["completion_tokens"]))
    return chunks


async def at_once(url: str, bodies: Sequence[dict[str, Any]]) -> list[Arrivals]:
    """All requests at the same time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
        return await asyncio.gather(*(arrivals(http, body) for body in bodies))


def rate(chunks: Arrivals, begin: int, end: int) -> float:
    """Tokens per second from token ``begin`` to token ``end`` of an output."""
    start_s, start = next(chunk for chunk in chunks if chunk[1] >= begin)
    end_s, last = next(chunk for chunk in chunks if chunk[1] >= end)
    return (last - start) / (end_s - start_s)


def measure(
    url: str, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> dict[str, float]:
    """Mean rates of the clients of one round."""
    bodies = [request_body(ids, args, seed) for seed, ids in enumerate(prompts)]
    chunks_of_clients = asyncio.run(at_once(url, bodies))
    return {
        "first": round(mean(rate(each, 1, FIRST) for each in chunks_of_clients), 1),
        "later": round(mean(rate(each, SKIPPED, args.tokens) for each in chunks_of_clients), 1),
    }


def main() -> None:
    """Start all servers, measure one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="a synthetic engine with prompts beside it")
    parser.add_argument("--clients", type=int, action="append", help="at once; 1 and 16 by default")
    parser.add_argument("--skip", type=int, default=0, help="prompts at the beginning (0)")
    parser.add_argument("--tokens", type=int, default=1024, help="of an output (1024)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of requests (0)")
    parser.add_argument("--chains", type=int, nargs="*", default=[], help="depths to compare with")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    clients = args.clients or [1, 16]
    lines = Path(f"{args.engine}.prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt_ids"] for line in lines[args.skip :]]
    fixed = {"none": ("--drafter", "none")} | {
        f"chain of {d}": (
            *("--draft-top-k", "1", "--draft-depth", str(d)),
            *("--draft-tokens", str(d)),
        )
        for d in args.chains
    }
    # The default draft learns, so it has a server of its own for each number of clients.
    names = [("default", n) for n in clients] + [(name, 0) for name in fixed]
    figures: dict[str, dict[str, list[dict[str, float]]]] = {f"{n} clients": {} for n in clients}
    with ExitStack() as stack:

        def start(name: tuple[str, int]) -> str:
            options = ("--served-model-name", "engine", "--no-prefix-cache")
            process = server_process(args.engine, *options, *fixed.get(name[0], ()))
            return stack.enter_context(process)[1]

        with ThreadPoolExecutor(len(names)) as pool:
            urls = dict(zip(names, pool.map(start, names), strict=True))
        for n in clients:
            for name, own in names:
                if own in (0, n):
                    url = urls[name, own]
                    rounds = [measure(url, prompts[:n], args) for _ in range(ROUNDS)]
                    figures[f"{n} clients"][name] = rounds
                    print(f"{n} clients, {name}: {json.dumps(rounds)}", flush=True)
    print(json.dumps(figures, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
