"""Compares serving with decoding: the same requests through a session and through a server.

Needs the extras ``serve`` and the engine's own. Prompts are random ids. The server is a separate
process on a free port of this machine; sessions run in this process, in succession. The effect of
an arrival on decoding sequences is measured by ``arrivals.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from server_process import server_process

from specbuild.cli.bench.server.client import Client, Sample, body_of
from specbuild.cli.bench.server.load import LoadSettings, measure
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

NAME = "engine"


@contextmanager
def server(engine: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Start a server; return its address, and wall and CPU seconds to /health."""
    started_s = time.perf_counter()
    # Prompts are prefilled in one chunk, as in a session.
    options = ("--served-model-name", NAME, "--no-prefix-cache")
    with server_process(engine, *options) as (process, url):
        urllib.request.urlopen(f"{url}/health", timeout=10).read()
        passed_s = time.perf_counter() - started_s
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        yield url, (passed_s, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))


def prompts(count: int, tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Return random ids that every vocabulary has."""
    drawn = random.Random(seed)
    return [tuple(drawn.choices(range(300, 1000), k=tokens)) for _ in range(count)]


def session_run(engine: Engine, ids: list[tuple[int, ...]], tokens: int) -> tuple[float, float]:
    """Return total seconds, and the median time per token after the first, of a batch."""
    params = GenerateParams(max_new_tokens=tokens, ignore_eos=True)
    named = [Prompt(str(i), prompt_ids=p) for i, p in enumerate(ids)]
    requests = engine.check_prompts(named, params)
    started_s = time.perf_counter()
    stream = engine.session.add(requests, DraftSetting())
    records = [event.record for event in stream if isinstance(event, FinishEvent)]
    passed_s = time.perf_counter() - started_s
    return passed_s, median(r.stats.tpot_s for r in records if r.stats.tpot_s is not None)


async def one_client(url: str, ids: list[tuple[int, ...]], tokens: int) -> list[Sample]:
    """Run requests one after the other."""
    client = Client(url, key=None, timeout_s=600)
    try:
        return [await client.complete(body_of(NAME, p, tokens)) for p in ids]
    finally:
        await client.close()


def at_once(url: str, clients: int, ids: list[tuple[int, ...]], tokens: int) -> float:
    """Return the tokens per second of a closed loop."""
    settings = LoadSettings(
        requests=len(ids), clients=clients, prompts=tuple(ids), max_new_tokens=tokens
    )
    report = asyncio.run(
        measure(url, settings, model=NAME, key=None, timeout_s=600, done=lambda _: None)
    )
    if report.errors:
        raise SystemExit(f"{report.errors} requests failed: {report.first_error}")
    return report.output_tokens_per_s


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=1024)
    parser.add_argument("--tokens", metavar="N", type=int, default=256)
    parser.add_argument("--clients", metavar="N", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, object] = {}
    engine = Engine.load(args.engine)
    session_run(engine, prompts(1, 64, 0), 32)
    single = prompts(args.rounds, args.prompt_tokens, 1)
    many = {n: prompts(n, args.prompt_tokens, 2) for n in args.clients}
    starts, ratios, loads = [], [], {n: [] for n in args.clients}
    with server(args.engine) as (url, start_s):
        starts.append(start_s)
        asyncio.run(one_client(url, prompts(1, 64, 0), 32))
        for ids in single:
            alone = session_run(engine, [ids], args.tokens)[1]
            seen = asyncio.run(one_client(url, [ids], args.tokens))[0]
            if seen.tpot_s is None:
                raise SystemExit(f"the request failed: {seen.error}")
            ratios.append((1e3 * alone, 1e3 * seen.tpot_s, seen.tpot_s / alone))
        for n, ids in many.items():
            for _ in range(args.rounds):
                whole_s, _tpot = session_run(engine, ids, args.tokens)
                own = n * args.tokens / whole_s
                served = at_once(url, n, ids, args.tokens)
                loads[n].append((own, served, served / own))
    with server(args.engine) as (_, start_s):
        starts.append(start_s)
    result["start_s"] = {"passed, of the processor": starts}
    result["one_client_ms_a_token"] = {"session, server, ratio": ratios}
    result["tokens_a_second"] = {
        f"{n} clients: session, server, ratio": v for n, v in loads.items()
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
