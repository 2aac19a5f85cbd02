"""Times whole steps, decoding and prefill of a CUDA engine.

    specbuild synth --geometry gpt-oss-20b --draft --unique-layers 2 --engine engine \
        --backend cuda --gpu sm_90a --max-seq-len 9216 --max-batch-size 16
    python benchmarks/steps.py engine engine.prompts.jsonl [--profile]

A step is one CUDA graph, replayed from the same state; decoding is timed by the host, prompts
included, and its tokens are held against those without a draft.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from specbuild.runtime.engine import Engine
from specbuild.runtime.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.step_timing import time_step

CONTEXT = 1000
OUTPUT_TOKENS = 256
BATCHES = (1, 4, 16)
DEPTHS = (0, 1, 2, 3, 4)


def shape_of(depth: int) -> DraftShape | None:
    """A chain, or no draft."""
    return DraftShape(1, depth, depth) if depth else None


def decode(
    engine: Engine, prompts: list[Prompt], depth: int, tokens: int
) -> tuple[list[RunRecord], float]:
    """The records in order, and the seconds that all of it took."""
    params = GenerateParams(max_new_tokens=tokens, ignore_eos=True)
    started_s = time.perf_counter()
    events = engine.generate(prompts, params, speculation=shape_of(depth))
    found = {event.request: event.record for event in events if isinstance(event, FinishEvent)}
    return [found[i] for i in range(len(prompts))], time.perf_counter() - started_s


def print_steps(engine: Engine) -> None:
    """Median seconds of a step by batch and chain."""
    for batch in BATCHES:
        for depth in DEPTHS:
            timing = time_step(engine, batch=batch, context=CONTEXT, shape=shape_of(depth))
            print(
                f"step: batch {batch:2d}, chain {depth}: {timing.step_s * 1e6:8.1f} us", flush=True
            )


def print_profile(engine: Engine, depth: int) -> None:
    """What the launches of a step add to it, by kernel."""
    shape = shape_of(depth)
    timing = time_step(engine, batch=1, context=CONTEXT, shape=shape, repeats=8, profile=True)
    added_s: dict[str, list[float]] = defaultdict(list)
    for launch in timing.launches:
        added_s[launch.kernel].append(launch.added_s)
    print(f"profile: batch 1, chain {depth}: {timing.step_s * 1e6:.1f} us")
    for kernel, times in sorted(added_s.items(), key=lambda item: -sum(item[1])):
        each = sum(times) / len(times) * 1e6
        print(f"  {kernel:50s} x{len(times):4d} {sum(times) * 1e6:9.1f} us, {each:7.2f} each")


def print_decoding(engine: Engine, prompts: list[Prompt]) -> None:
    """Tokens a second of the whole batch, and whether a draft changed a token."""
    for batch in (1, 16):
        plain: list[RunRecord] = []
        for depth in DEPTHS[:4]:
            records, seconds = decode(engine, prompts[:batch], depth, OUTPUT_TOKENS)
            plain = plain or records
            same = all(a.output_ids == b.output_ids for a, b in zip(plain, records, strict=True))
            stats = records[0].stats
            rate = batch * OUTPUT_TOKENS / seconds
            print(
                f"decoding: batch {batch:2d}, chain {depth}: {rate:6.0f} tokens/s, "
                f"{stats.mean_acceptance_length:.2f} tokens a step, "
                f"first token {stats.ttft_s * 1e3:.1f} ms, tokens {'equal' if same else 'DIFFER'}",
                flush=True,
            )


def print_prefill(engine: Engine) -> None:
    """Time to the first token of random prompts."""
    random = np.random.default_rng(0)
    for tokens in (2048, 8192, 8192):
        ids = random.integers(0, engine.manifest.target.vocab, tokens).tolist()
        records, _ = decode(engine, [Prompt("prompt", ids=tuple(ids))], 0, 2)
        print(f"prefill: {tokens} tokens: {records[0].stats.ttft_s * 1e3:.1f} ms", flush=True)


def main() -> None:
    """Prints everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("prompts", type=Path, help="JSON lines with prompt_ids")
    parser.add_argument("--profile", action="store_true", help="also the parts of a step")
    options = parser.parse_args()
    started_s = time.perf_counter()
    engine = Engine.load(options.engine)
    print(f"load: {time.perf_counter() - started_s:.2f} s")
    lines = [json.loads(line) for line in options.prompts.read_text().splitlines()[:16]]
    prompts = [Prompt(line["id"], ids=tuple(line["prompt_ids"])) for line in lines]
    print_steps(engine)
    if options.profile:
        for depth in (0, 3):
            print_profile(engine, depth)
    print_decoding(engine, prompts)
    print_prefill(engine)


if __name__ == "__main__":
    main()
