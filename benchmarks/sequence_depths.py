"""Measures a depth for each sequence against one depth for all, on an engine of ``synth``.

python benchmarks/sequence_depths.py ENGINE --batch 4 --batch 16 [--tokens 512] [--rounds 3]

Step costs are measured first. Then, in each round: steps with each fixed chain, the policy without
ragged steps, and the policy with them. Tokens per second are those of the time in which all
sequences decode: from the last first token to the first end. A line of JSON for each batch has the
rates of all rounds, the rates relative to the best fixed chain by the medians, tokens per step, and
whether all outputs are equal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from specbuild import Engine, GenerateParams
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.device_costs import StepCosts
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.measure.step_measurement import measure_step_costs
from specbuild.runtime.request import FinishEvent, Prompt

WITHOUT_RAGGED, WITH_RAGGED = "one depth", "depth per sequence"


def main() -> None:
    """Measure the engine that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batch", type=int, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--costs-s", type=float, default=10.0)
    parser.add_argument("--chain", type=int, action="append", help="all chains by default")
    args = parser.parse_args()
    written = Path(f"{args.engine}.prompts.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line) for line in written]
    engine = Engine.load(args.engine)
    costs = measure_step_costs(engine, lambda _: None, budget_s=args.costs_s, repeats=5)
    for batch in args.batch:
        ids = [tuple(line["prompt_ids"]) for line in islice(cycle(lines), batch)]
        prompts = [Prompt(str(b), prompt_ids=of_b) for b, of_b in enumerate(ids)]
        print(json.dumps(measure(engine, costs, prompts, args)), flush=True)


def measure(
    engine: Engine, costs: StepCosts, prompts: Sequence[Prompt], args: argparse.Namespace
) -> dict[str, Any]:
    """Run everything in turn, after one round that does not count."""
    even = replace(costs, steps=tuple(c for c in costs.steps if not c.rows_per_sequence))
    policies = {WITHOUT_RAGGED: even, WITH_RAGGED: costs}
    engines = {
        name: Engine(engine.manifest, engine.executor, text=engine.text, step_costs=of_policy)
        for name, of_policy in policies.items()
    }
    table = ProgramTable(cuda_executor(engine).plan)
    fixed = {
        f"chain {s.draft_depth}": s
        for s in table.shapes()
        if s.draft_top_k == 1 and table.max_sequences(s, full_logits=False) >= len(prompts)
        if args.chain is None or s.draft_depth in args.chain
    }
    params = GenerateParams(max_new_tokens=args.tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {}
    lengths: dict[str, float] = {}
    outputs = set()
    for round_index in range(args.rounds + 1):
        for name in (*fixed, *policies):
            of_run = _run(engines.get(name, engine), prompts, params, fixed.get(name))
            outputs.add(of_run[2])
            if round_index:
                rates.setdefault(name, []).append(round(of_run[0], 1))
                lengths[name] = round(of_run[1], 3)
    medians = {name: median(values) for name, values in rates.items()}
    best = max(medians[name] for name in fixed)
    return {
        "batch": len(prompts),
        "tokens": args.tokens,
        "rates": rates,
        "over_best_chain": {name: round(rate / best, 4) for name, rate in medians.items()},
        "tokens_per_step": lengths,
        "equal_outputs": len(outputs) == 1,
        "step_us": _step_us(costs, len(prompts)),
        "reason": engines[WITH_RAGGED].default_draft.reason,
    }


def _run(
    engine: Engine, prompts: Sequence[Prompt], params: GenerateParams, shape: DraftShape | None
) -> tuple[float, float, tuple[tuple[int, ...], ...]]:
    """Tokens per second while all sequences decode, tokens per step, and the outputs."""
    options = {} if shape is None else {"speculation": shape}
    started: set[int] = set()
    count, first_s, last_s = 0, 0.0, 0.0
    records = {}
    for event in engine.generate(prompts, params, **options):
        if isinstance(event, FinishEvent):
            records[event.request] = event.record
        elif not records:
            if len(started) == len(prompts):
                count, last_s = count + 1, perf_counter()
            elif event.request not in started:
                started.add(event.request)
                first_s = perf_counter()
    of_all = [records[b] for b in range(len(prompts))]
    emitted = sum(len(r.output_ids) - 1 for r in of_all) / sum(r.stats.steps for r in of_all)
    return count / (last_s - first_s), emitted, tuple(tuple(r.output_ids) for r in of_all)


def _step_us(costs: StepCosts, batch: int) -> dict[str, float]:
    """The table's times of this batch at its first context."""
    return {
        f"{c.draft_depth} in {c.rows_per_sequence or c.draft_tokens + 1} rows": round(
            1e6 * c.step_s[0], 1
        )
        for c in costs.steps
        if c.batch == batch and not c.host_proposal
    }


if __name__ == "__main__":
    main()
