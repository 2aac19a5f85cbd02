"""Times prompts to their first token, and the bytes and operations of their chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np

from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import Phase, phase_of
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.prompt_launches import prompt_launches
from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.measure.byte_floor import BytesByPart, EngineTraffic, Work
from specbuild.runtime.request import GenerateParams, Prompt, TokenEvent

_REPEATS = 3

Emit = Callable[[Phase], None]


def time_prefill(
    engine: Engine,
    lengths: Sequence[int],
    budget: Budget,
    emit: Emit,
    *,
    traffic: EngineTraffic,
    ceiling_bytes_per_s: float | None,
) -> None:
    """Time random prompts from the call to their first token, for which the host waits."""
    executor = cuda_executor(engine)
    chunk_rows = ProgramTable(executor.plan).prefill_rows
    for tokens in lengths:
        if tokens >= engine.manifest.limits.max_seq_len:
            budget.left_out.append(f"prefill of {tokens} tokens: longer than the engine takes")
            continue
        if not budget.allows(f"prefill of {tokens} tokens"):
            continue
        times = [_first_token_s(engine, tokens, seed) for seed in range(1 + _REPEATS)]
        chunks, floor, operations = prompt_launches(tokens, chunk_rows), BytesByPart(), 0.0
        for i, rows in enumerate(chunks):
            work = Work(rows, 1, sum(chunks[:i]), logit_rows=1)
            floor = floor.plus(_prompt_bytes(traffic, work))
            operations += _prompt_operations(traffic, work)
        row = phase_of(
            "prefill",
            f"{tokens} tokens",
            Work(tokens, 1, 0),
            time_s=median(times[1:]),
            floor=floor,
            operations=operations,
            experts=traffic.target.distinct_experts(Work(chunks[0], 1, 0)),
            ceiling_bytes_per_s=ceiling_bytes_per_s,
        )
        emit(replace(row, tokens_per_s=tokens / row.time_s))


def _prompt_bytes(traffic: EngineTraffic, work: Work) -> BytesByPart:
    """Return the work of a chunk: the target, and the draft's keys and values."""
    target = traffic.target.bytes_read(work)
    if traffic.taken_up is None:
        return target
    return target.plus(traffic.taken_up.bytes_read(work).as_draft())


def _prompt_operations(traffic: EngineTraffic, work: Work) -> float:
    operations = traffic.target.floating_operations(work)
    if traffic.taken_up is None:
        return operations
    return operations + traffic.taken_up.floating_operations(replace(work, logit_rows=0))


def _first_token_s(engine: Engine, tokens: int, seed: int) -> float:
    ids = np.random.default_rng(seed).integers(0, engine.manifest.target.vocab, tokens)
    prompt = Prompt("prompt", prompt_ids=tuple(map(int, ids)))
    started_s = perf_counter()
    time_s = 0.0
    params = GenerateParams(max_new_tokens=1, ignore_eos=True)
    for event in engine.generate([prompt], params, speculation=None):
        if isinstance(event, TokenEvent) and not time_s:
            time_s = perf_counter() - started_s
    return time_s
