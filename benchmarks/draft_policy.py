"""Compares the default draft with none and a fixed chain, also with cost tables wrong by a factor.

One process has an engine for each variant; every prompt is decoded by all of them in turn, in a
different order each round:

    specbuild build --model examples/tiny-gpt-oss/target --draft examples/tiny-gpt-oss/draft \\
      --output engine
    python benchmarks/draft_policy.py engine --date 2026-11-24 --output record.json

Prompts are the example's (``examples/tiny-gpt-oss/prompts.jsonl``) and pieces of the standard
library's ``json``. Ratios are times without a draft divided by times with one: of wall time, and of
the process's CPU time, which other work on the machine affects less.
"""

from __future__ import annotations

import argparse
import inspect
import json
import json.decoder
import json.encoder
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time

from specbuild.runtime.decode.host import costs as host_costs
from specbuild.runtime.device import this_device
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.engine import Engine, Speculation
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-gpt-oss"
PACKAGES = ("specbuild", "onnxruntime", "numpy", "tokenizers")
CHAIN = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)
MODES = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.0, seed=1)}
# The factors of the target's times and of the times that drafts add.
TABLES = {
    "as measured": (1.0, 1.0),
    "target x2": (2.0, 1.0),
    "target /2": (0.5, 1.0),
    "drafts x2": (1.0, 2.0),
    "drafts /2": (1.0, 0.5),
}


def prompt_sets(count: int) -> dict[str, list[Prompt]]:
    """Return up to ``count`` prompts of each set, evenly selected."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    example = [Prompt(r["id"], None, r["prompt"]) for r in map(json.loads, lines)]
    pieces = []
    for module in (json.decoder, json.encoder):
        text = inspect.getsource(module)
        pieces += [
            Prompt(f"{module.__name__}:{start}", None, text[start : start + 400])
            for start in range(0, len(text) - 400, 1000)
        ]
    sets = {"prompts.jsonl": example, "json": pieces}
    return {name: result[:: max(1, len(result) // count)][:count] for name, result in sets.items()}


def with_table(path: Path, target: float, drafts: float) -> Engine:
    """Return an engine that measures its table now and uses it with parts multiplied."""
    engine = Engine.load(path)
    run = host_costs.CostMeasurement.run

    def multiplied(measurement: host_costs.CostMeasurement) -> CostTable:
        table = run(measurement)
        return CostTable(
            table.target_rows,
            tuple(target * t for t in table.target_s),
            tuple(drafts * t for t in table.draft_s),
            table.row_s,
        )

    host_costs.CostMeasurement.run = multiplied  # type: ignore[method-assign]
    try:
        assert engine.default_draft.reason
    finally:
        host_costs.CostMeasurement.run = run  # type: ignore[method-assign]
    return engine


def decode(engine: Engine, prompt: Prompt, params: GenerateParams, how: Speculation) -> RunRecord:
    """Return one prompt's result."""
    events = engine.generate([prompt], params, speculation=how)
    return next(event.record for event in events if isinstance(event, FinishEvent))


def timed(call: Callable[[], RunRecord]) -> tuple[float, float, RunRecord]:
    """Return wall seconds, CPU seconds, and the result."""
    clock_s, cpu_s = perf_counter(), process_time()
    record = call()
    return perf_counter() - clock_s, process_time() - cpu_s, record


def compared(
    variants: dict[str, tuple[Engine, Speculation]], prompts: list[Prompt], params: GenerateParams
) -> dict[str, dict[str, float]]:
    """Compare every variant with the one without a draft, prompt by prompt."""
    result: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    names = list(variants)
    for number, prompt in enumerate(prompts):
        round_index = number % len(names)
        runs = {
            name: timed(lambda v=variants[name]: decode(v[0], prompt, params, v[1]))  # noqa: B023
            for name in names[round_index:] + names[:round_index]
        }
        plain_s, plain_cpu_s, plain = runs["none"]
        for name, (clock_s, cpu_s, record) in runs.items():
            same = record.output_ids == plain.output_ids
            steps = record.stats.mean_acceptance_length
            result[name].append((plain_s / clock_s, plain_cpu_s / cpu_s, steps, float(not same)))
    return {
        name: {
            "ratio_median": round(statistics.median(r[0] for r in rows), 3),
            "cpu_ratio_median": round(statistics.median(r[1] for r in rows), 3),
            "cpu_ratio_first": round(rows[0][1], 3),
            "cpu_ratio_min": round(min(r[1] for r in rows), 3),
            "tokens_a_step": round(statistics.mean(r[2] for r in rows), 2),
            "outputs_that_differ": sum(r[3] for r in rows),
        }
        for name, rows in result.items()
    }


def main() -> None:
    """Print the ratios, and write them with the machine and the versions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="the example's CPU engine, with its draft")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each set (12)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each prompt (256)")
    parser.add_argument("--date", help="recorded as given")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    engines = {f"default, {name}": with_table(args.engine, *by) for name, by in TABLES.items()}
    first = next(iter(engines.values()))
    variants: dict[str, tuple[Engine, Speculation]] = {
        "none": (first, None),
        "chain of 3": (first, CHAIN),
    } | {name: (engine, "default") for name, engine in engines.items()}
    figures = {}
    for set_name, prompts in prompt_sets(args.prompts).items():
        for mode, sampling in MODES.items():
            params = GenerateParams(max_new_tokens=args.tokens, sampling=sampling)
            figures[f"{set_name}, {mode}"] = compared(variants, prompts, params)
            print(f"{set_name}, {mode}", json.dumps(figures[f"{set_name}, {mode}"], indent=1))
    here = this_device()
    result = {
        "command": f"python benchmarks/draft_policy.py engine --prompts {args.prompts} "
        f"--tokens {args.tokens}",
        "date": args.date,
        "processor": here.cpu_name,
        "cores": here.cores,
        "threads": 1,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "figures": figures,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
