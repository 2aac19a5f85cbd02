"""Measures how an arriving prompt affects decoding sequences, and its TTFT: one JSON line.

Several sequences decode, and now and then a prompt with one output token arrives. The output has
the TTFT of these prompts, and the time between two deliveries to a decoding sequence, with and
without an arrival.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from threading import Thread

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.session import Stream
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

_EXAMPLES = """examples:
  python benchmarks/arrivals.py engine --batch 16 --prompt-tokens 1024 --depth 3
  python benchmarks/arrivals.py engine --batch 16 --prompt-tokens 8192 --prefill-rows 512
"""
_PAUSE_S = 0.25


def main() -> None:
    """Serve all requests, and print the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batch", type=int, default=16, help="sequences that decode (16)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of an arrival (1024)")
    parser.add_argument("--arrivals", type=int, default=10, help="how many come (10)")
    parser.add_argument("--depth", type=int, default=0, help="of a chain of drafts; 0 is none (0)")
    parser.add_argument("--prefill-rows", type=int, help="prompt rows of a turn")
    args = parser.parse_args()
    settings = RuntimeSettings(prefill=PrefillSchedule(args.prefill_rows))
    engine = Engine.load(args.engine, settings)
    shape = DraftShape(1, args.depth, args.depth) if args.depth else None
    setting = DraftSetting(shape)
    random, vocab = Random(0), engine.manifest.target.vocab

    def added(tokens: int, requested: int) -> Stream:
        prompt = Prompt("p", prompt_ids=tuple(random.choices(range(vocab), k=tokens)))
        params = GenerateParams(max_new_tokens=requested, ignore_eos=True)
        return engine.session.add(engine.check_prompts([prompt], params), setting)

    maximum = engine.manifest.limits.max_seq_len
    decoding = [added(32, maximum - 32) for _ in range(args.batch - 1)]
    times: list[list[float]] = [[] for _ in decoding]
    readers = [
        Thread(target=_note, args=each, daemon=True) for each in zip(decoding, times, strict=True)
    ]
    for reader in readers:
        reader.start()
    list(added(args.prompt_tokens, 2))  # The programs are loaded from here on.
    waits: list[tuple[float, float]] = []
    for _ in range(args.arrivals):
        time.sleep(_PAUSE_S)
        started_s = time.perf_counter()
        list(added(args.prompt_tokens, 1))
        waits.append((started_s, time.perf_counter()))
    for stream in decoding:
        stream.close()
    for reader in readers:
        reader.join()
    print(json.dumps(_seen(waits, times)))


def _note(stream: Stream, times: list[float]) -> None:
    """Return the time of each delivery."""
    done = False
    while not done:
        events = stream.receive()
        times.append(time.perf_counter())
        done = any(isinstance(event, FinishEvent) for event in events)


def _seen(
    waits: Sequence[tuple[float, float]], times: Sequence[Sequence[float]]
) -> dict[str, float]:
    beside, apart = [], []
    for each in times:
        for before_s, after_s in itertools.pairwise(each):
            if after_s < waits[0][0]:
                continue
            near = any(before_s < end_s and start_s < after_s for start_s, end_s in waits)
            (beside if near else apart).append(after_s - before_s)
    first = sorted(end_s - start_s for start_s, end_s in waits)
    return {
        "ttft_median_ms": round(1e3 * first[len(first) // 2], 2),
        "ttft_worst_ms": round(1e3 * first[-1], 2),
        "gap_median_ms": round(1e3 * sorted(apart)[len(apart) // 2], 2) if apart else 0.0,
        "gap_worst_beside_ms": round(1e3 * max(beside), 2) if beside else 0.0,
        "decoded": sum(map(len, times)),
    }


if __name__ == "__main__":
    main()
