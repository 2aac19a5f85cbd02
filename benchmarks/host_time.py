"""Measures the host's work per step, in microseconds, with ids only and with text.

The time in which the host waits for a step's result is subtracted. The rest is planning, starting,
reading, accepting, detokenizing and creating events, which must fit into a step. For a CPU engine
the time within graphs is subtracted, and CPU time is counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import Event, GenerateParams, Prompt, Request


def requests_of(engine: Engine, batch: int, tokens: int, *, text: bool) -> list[Request]:
    """Return requests of random prompts of 16 tokens."""
    drawn, vocab = Random(1), engine.manifest.target.vocab
    named = [
        Prompt(str(i), prompt_ids=tuple(drawn.choices(range(vocab // 2), k=16)))
        for i in range(batch)
    ]
    params = GenerateParams(max_new_tokens=tokens, ignore_eos=True, detokenize=text)
    return engine.check_prompts(named, params)


def host_us_beside_graphs(
    engine: Engine, batch: int, tokens: int, shape: DraftShape | None, *, text: bool
) -> list[float]:
    """Measure as :func:`host_us`, for an engine whose graphs the host calls by role."""
    executor: Any = engine.executor
    run, turn = executor.run, Loop.turn
    passed: list[float] = []
    within_s = 0.0

    def ran(role: str, feeds: Any) -> Any:
        nonlocal within_s
        begun_s = thread_time()
        outputs = run(role, feeds)
        within_s += thread_time() - begun_s
        return outputs

    def turned(loop: Loop) -> list[Event]:
        nonlocal within_s
        prompts, begun_s, within_s = bool(loop._scheduler._prompts), thread_time(), 0.0
        events = turn(loop)
        host_s = thread_time() - begun_s - within_s
        if not prompts and len({event.request for event in events}) == batch:
            passed.append(1e6 * host_s)
        return events

    executor.run, Loop.turn = ran, turned  # type: ignore[method-assign]
    try:
        requests = requests_of(engine, batch, tokens, text=text)
        with engine.session.exclusive(requests, DraftSetting(shape)) as all_:
            for _ in all_:
                pass
    finally:
        executor.run, Loop.turn = run, turn  # type: ignore[method-assign]
    return passed[1:]


def host_us(
    engine: Engine, batch: int, tokens: int, shape: DraftShape | None, *, text: bool
) -> list[float]:
    """Return the host time of each step with all sequences, in microseconds."""
    requests = requests_of(engine, batch, tokens, text=text)
    executor: Any = engine.executor
    wait: Callable[..., Any] = executor.wait_step
    passed: dict[int, list[float]] = {}
    left_s = 0.0
    taking_part = 0

    def waited(number: int, rows: int) -> Any:
        nonlocal left_s, taking_part
        begun_s = perf_counter()
        result = wait(number, rows)
        if left_s:
            passed.setdefault(taking_part, []).append(1e6 * (begun_s - left_s))
        taking_part, left_s = sum(count > 0 for count in result.count), perf_counter()
        return result

    executor.wait_step = waited
    try:
        with engine.session.exclusive(requests, DraftSetting(shape)) as events:
            for _ in events:
                pass
    finally:
        executor.wait_step = wait
    return passed[max(passed)]


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="an engine for CUDA or the CPU")
    parser.add_argument("--batch", metavar="N", type=int, default=64)
    parser.add_argument("--tokens", metavar="N", type=int, default=200)
    parser.add_argument("--depth", metavar="D", type=int, default=3)
    args = parser.parse_args()
    engine = Engine.load(args.engine)
    result = {}
    measure = host_us if isinstance(engine.executor, DeviceExecutor) else host_us_beside_graphs
    for text in (False, True):
        for shape in (None, DraftShape(1, args.depth, args.depth)):
            measure(engine, args.batch, 16, shape, text=text)
            times = measure(engine, args.batch, args.tokens, shape, text=text)
            name = "with text" if text else "ids only"
            draft = "no draft" if shape is None else f"chain of {args.depth}"
            result[f"{name}, {draft}"] = {
                "median_us": round(median(times), 1),
                "worst_us": round(max(times), 1),
                "steps": len(times),
            }
    print(json.dumps({"batch": args.batch, "host time of a step": result}, indent=1))


if __name__ == "__main__":
    main()
