"""A GGUF file on a CPU with specbuild and with llama.cpp: tokens per second and engine size.

    .venv/bin/pip install xllamacpp
    .venv/bin/python benchmarks/beside_llama_cpp.py MODEL.gguf --threads 1 --output FILE.json

Each decodes 128 tokens greedily after a prompt of 7, without a draft, in a process of its own. They
take turns, and the order of a pair alternates. Figures are medians of the pairs. The machine must
be idle: ``load_average`` in the record is the one before the first pair.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.device import this_device
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

PROMPT = (504, 3575, 282, 4649, 314, 260, 2365)
CONTEXT = 2048
Decode = Callable[[int], dict[str, float]]


def specbuild_decoder(engine: Path, threads: int) -> tuple[Decode, float]:
    """Return a function that decodes, and the seconds to the engine's first token."""
    started = time.perf_counter()
    loaded = Engine.load(engine, settings=RuntimeSettings(threads=threads, prefix_caching="off"))

    def decode(new_tokens: int) -> dict[str, float]:
        params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=0.0)
        prompts = [Prompt("0", prompt_ids=PROMPT)]
        events = loaded.generate(prompts, params, speculation=None)
        record = next(event.record for event in events if isinstance(event, FinishEvent))
        return {
            "tokens_per_s": 1 / record.stats.tpot_s,
            "first_token_ms": 1e3 * record.stats.ttft_s,
        }

    decode(2)
    return decode, time.perf_counter() - started


def llama_cpp_decoder(model: Path, threads: int) -> tuple[Decode, float]:
    """Return the same for llama.cpp's server, called in its own process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx, params.n_parallel, params.n_gpu_layers = CONTEXT, 1, 0
    started = time.perf_counter()
    server = xllamacpp.Server(params)

    def decode(new_tokens: int) -> dict[str, float]:
        request = {
            "prompt": list(PROMPT),
            "n_predict": new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        timings = server.handle_completions(request)["timings"]
        # Its generation time starts at the first token.
        return {
            "tokens_per_s": 1e3 * (timings["predicted_n"] - 1) / timings["predicted_ms"],
            "first_token_ms": timings["prompt_ms"],
        }

    decode(2)
    return decode, time.perf_counter() - started


def work(make: Callable[[Path, int], tuple[Decode, float]], connection: Connection, path: Path,
         threads: int) -> None:  # fmt: skip
    """Load a program, then decode as often as requested."""
    decode, load_s = make(path, threads)
    connection.send(load_s)
    while new_tokens := connection.recv():
        connection.send(decode(new_tokens))


class Worker:
    """A program in its own process."""

    def __init__(self, make: Callable[..., Any], path: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(make, theirs, path, threads))
        self._process.start()
        theirs.close()  # so that a failing process ends the wait for it
        self.load_s = self._connection.recv()

    def decode(self, new_tokens: int) -> dict[str, float]:
        """Decode once."""
        self._connection.send(new_tokens)
        result: dict[str, float] = self._connection.recv()
        return result

    def close(self) -> None:
        """End the process."""
        self._connection.send(0)
        self._process.join()


def compared(model: Path, engine: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one number of threads."""
    workers = {
        "specbuild": Worker(specbuild_decoder, engine, args.threads),
        "llama_cpp": Worker(llama_cpp_decoder, model, args.threads),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    names = list(workers)
    for _ in range(args.pairs):
        for name in names:
            runs[name].append(workers[name].decode(args.new_tokens))
        names.reverse()
    for worker in workers.values():
        worker.close()

    def median(name: str, figure: str) -> float:
        return round(statistics.median(run[figure] for run in runs[name]), 1)

    ratios = [
        ours["tokens_per_s"] / theirs["tokens_per_s"]
        for ours, theirs in zip(runs["specbuild"], runs["llama_cpp"], strict=True)
    ]
    return {
        "times_as_fast_as_llama_cpp": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        **{
            f"{name}_{figure}": median(name, figure)
            for name in workers
            for figure in ("tokens_per_s", "first_token_ms")
        },
        **{f"{name}_load_s": round(worker.load_s, 2) for name, worker in workers.items()},
    }


def main() -> None:
    """Print the figures, and write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-math", choices=("fast", "exact"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--date", help="recorded as given")
    args = parser.parse_args()
    here = this_device()
    with tempfile.TemporaryDirectory() as folder:
        options = BuildOptions.from_flat(
            model=args.model, output=Path(folder) / "engine", max_seq_len=CONTEXT,
            cpu_math=args.cpu_math,
        )  # fmt: skip
        build(options, SilentProgress())
        load = os.getloadavg()[0]
        figures = compared(args.model, options.output, args)
        engine_bytes = sum(file.stat().st_size for file in options.output.iterdir())
    text = json.dumps({
        "command": "python benchmarks/beside_llama_cpp.py",
        "date": args.date,
        "model": args.model.name,
        "processor": here.cpu_name,
        "cores": here.cores,
        "load_average": round(load, 2),
        "threads": args.threads,
        "cpu_math": args.cpu_math,
        "prompt_tokens": len(PROMPT),
        "new_tokens": args.new_tokens,
        "pairs": args.pairs,
        "engine_bytes_per_file_byte": round(engine_bytes / args.model.stat().st_size, 3),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("onnxruntime", "numpy", "xllamacpp")},
        **figures,
    }, indent=1)  # fmt: skip
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
