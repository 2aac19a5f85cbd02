"""Measures the delay of callbacks of an event loop while an engine decodes in another thread.

Three loops run a callback each millisecond: the server's, which shares its process with the
engine's thread; one in a separate process at the same time, which only competes for processors; and
one beside a thread that waits for steps in one of two ways: polling, as numpy and a driver call do,
or in a call that releases the GIL.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

NAME = "engine"
INTERVAL_S = 0.001
STEP_S = 0.002
LOOKS = 32


async def probe(lags_s: list[float]) -> None:
    """Record the delay of each callback, until cancelled."""
    while True:
        due_s = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lags_s.append(time.perf_counter() - due_s)


def spread_ms(lags_s: Sequence[float]) -> dict[str, float]:
    """Return percentiles, in milliseconds."""
    p50, p90, p99 = np.percentile(lags_s, [50, 90, 99])
    worst = max(lags_s)
    figures = {"p50": p50, "p90": p90, "p99": p99, "worst": worst}
    return {name: round(1e3 * float(value), 3) for name, value in figures.items()}


def serve_probed(engine: Path) -> None:
    """Run a server with a probed loop; at its end it prints the delays during open requests."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.serve.app import App, AppOptions
    from specbuild.runtime.serve.server import Address, Server
    from specbuild.runtime.serve.service import ServiceOptions

    app = App(
        Engine.load(engine), AppOptions(service=ServiceOptions(names=(NAME,)), output_format=None)
    )
    lags_s: list[float] = []

    class Probed(Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            self.probe = asyncio.create_task(self._probe())

        async def _probe(self) -> None:
            while True:
                while not app.service.open_requests:
                    await asyncio.sleep(0.01)
                due_s = time.perf_counter() + INTERVAL_S
                await asyncio.sleep(INTERVAL_S)
                lags_s.append(time.perf_counter() - due_s)

    def ready(name: Any) -> None:
        print(f"serving at http://127.0.0.1:{name[1]}", file=sys.stderr, flush=True)

    listening = Address(port=0).listen()
    Probed(app, ready=ready).run(sockets=[listening])
    print(json.dumps(lags_s))


def stand_by() -> None:
    """Run a loop in an otherwise idle process, until a signal ends it."""
    lags_s: list[float] = []

    async def until_told() -> None:
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        task = asyncio.create_task(probe(lags_s))
        await told.wait()
        task.cancel()

    asyncio.run(until_told())
    print(json.dumps(lags_s))


@contextmanager
def child(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[float]]]:
    """Run this script in a separate process; after the end the list has its delays."""
    command = [sys.executable, __file__, *arguments]
    pipe, lags_s = subprocess.PIPE, list[float]()
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        yield process, lags_s
        process.terminate()
        assert process.stdout is not None
        lags_s += json.loads(process.stdout.read())


def load(engine: Path, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """Measure both loops while clients are served."""
    from specbuild.cli.bench.server.load import LoadSettings, measure

    with child("--serve", str(engine)) as (server, in_thread_s):
        assert server.stderr is not None
        while "serving" not in (line := server.stderr.readline()):
            if not line:
                raise SystemExit("the server ended before it served")
        url = line.split()[-1]
        settings = LoadSettings(requests=requests, clients=clients, max_new_tokens=tokens)
        with child("--stand-by") as (_, alone_s):
            report = asyncio.run(
                measure(url, settings, model=NAME, key=None, timeout_s=600, done=lambda _: None)
            )
    if report.errors:
        raise SystemExit(f"{report.errors} requests failed: {report.first_error}")
    return {
        "tokens_a_second": round(report.output_tokens_per_s, 1),
        "the server's loop, ms": spread_ms(in_thread_s),
        "a loop alone, ms": spread_ms(alone_s),
    }


def beside(wait: Callable[[], None] | None, seconds: float) -> dict[str, float]:
    """Measure a loop beside a thread that waits for one step after the other."""
    ended, lags_s = threading.Event(), list[float]()

    def steps() -> None:
        while wait is not None and not ended.is_set():
            wait()

    async def run() -> None:
        task = asyncio.create_task(probe(lags_s))
        await asyncio.sleep(seconds)
        task.cancel()

    thread = threading.Thread(target=steps)
    thread.start()
    asyncio.run(run())
    ended.set()
    thread.join()
    return spread_ms(lags_s)


def look() -> None:
    """Poll an array as often as between two driver queries, which release the GIL."""
    done, args = np.zeros(1, np.int32), ctypes.CDLL(None).getppid
    until_s = time.perf_counter() + STEP_S
    while time.perf_counter() < until_s:
        if any(done[0] == 1 for _ in range(LOOKS)):
            break
        args()


def sleep_without_gil() -> None:
    """Wait as an event's synchronization does."""
    ctypes.CDLL(None).usleep(int(1e6 * STEP_S))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--clients", metavar="N", type=int, default=8)
    parser.add_argument("--requests", metavar="N", type=int, default=24)
    parser.add_argument("--tokens", metavar="N", type=int, default=64)
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--seconds", metavar="S", type=float, default=5.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stand-by", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve_probed(args.serve)
    elif args.stand_by:
        stand_by()
    else:
        result: dict[str, Any] = {"clients": args.clients, "loads": [], "waits, ms": []}
        for _ in range(args.rounds):
            if args.engine is not None:
                result["loads"].append(load(args.engine, args.clients, args.requests, args.tokens))
            ways = {"none": None, "looking": look, "without the GIL": sleep_without_gil}
            result["waits, ms"].append(
                {name: beside(wait, args.seconds) for name, wait in ways.items()}
            )
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
