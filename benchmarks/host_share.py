"""Processor time per token of a server, by thread, and the tokens per second that it reaches.

The server is ``stand_in_server.py``: its device takes a fixed time and no processor, so that all of
the time is the host's. With ``--before`` the server of another checkout runs too, the two are
loaded in turn, and the figures are compared in pairs. The load generator is a process of its own.

    python benchmarks/host_share.py ENGINE --before ../main --clients 32 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from serve_load import Load, measure, processor_s

HERE = Path(__file__).parent


@contextmanager
def stand_in_server(python: Path, words: list[str]) -> Iterator[tuple[int, int]]:
    """Run a server of a checkout; its process id and its port. It ends with the context."""
    command = [python, HERE / "stand_in_server.py", *words, "--port", "0", "--max-queue", "2000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while "serving" not in (line := process.stderr.readline()):
            if not line:
                raise SystemExit(f"the server ended with {process.wait()}")
        yield process.pid, int(line.split(":")[-1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def main_thread_s(pid: int) -> float:
    """The processor time of a process's first thread, which runs the server's event loop."""
    ticks = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def host_figures(pid: int, load: Load, args: Any) -> dict[str, float]:
    """The figures of one server under load."""
    before_s, loop_before_s = processor_s(pid), main_thread_s(pid)
    figures = measure(load, args.clients, args.requests, args.processes, pid)
    used_s, loop_s = processor_s(pid) - before_s, main_thread_s(pid) - loop_before_s
    tokens = args.requests * load.tokens
    return {
        "cpu_us_a_token": round(1e6 * used_s / tokens, 2),
        "event_loop_us_a_token": round(1e6 * loop_s / tokens, 2),
        "other_threads_us_a_token": round(1e6 * (used_s - loop_s) / tokens, 2),
        "tokens_a_second": figures["output_tokens_per_s"],
        "tpot_ms": figures["tpot_ms"]["p50"],
        "ttft_ms": figures["ttft_ms"]["p50"],
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", type=Path, help="an engine for CUDA")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout with a .venv")
    parser.add_argument("--clients", metavar="N", type=int, default=32)
    parser.add_argument("--requests", metavar="N", type=int, default=128)
    parser.add_argument("--tokens", metavar="N", type=int, default=256)
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=128)
    parser.add_argument("--processes", metavar="N", type=int, default=1)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--step-ms", metavar="MS", default="0.75")
    parser.add_argument("--prefill-ms", metavar="MS", default="1.0")
    args, options = parser.parse_known_args()
    words = [str(args.engine), "--step-ms", args.step_ms, "--prefill-ms", args.prefill_ms]
    words += ["--served-model-name", "engine", *options]
    pythons = {"now": Path(sys.executable)}
    if args.before is not None:
        pythons["before"] = args.before / ".venv" / "bin" / "python"
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with ExitStack() as stack:
        servers = {}
        for name, python in pythons.items():
            pid, port = stack.enter_context(stand_in_server(python, words))
            load = Load(
                "127.0.0.1", port, "engine", args.tokens, args.prompt_tokens, chat=args.chat
            )
            # The first requests of a server pay for its start.
            measure(load, args.clients, args.clients, args.processes, None)
            servers[name] = pid, load
        for _ in range(args.rounds):
            for name, (pid, load) in servers.items():
                rounds[name].append(host_figures(pid, load, args))
    result: dict[str, Any] = {"clients": args.clients, "rounds": rounds}
    if args.before is not None:
        pairs = [*zip(rounds["now"], rounds["before"], strict=True)]
        result["median_ratio_now_to_before"] = {
            name: round(median(now[name] / before[name] for now, before in pairs), 3)
            for name in pairs[0][0]
            if all(before[name] for _, before in pairs)
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
