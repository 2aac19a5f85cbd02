"""Measures rows of ``bench_gpu.py`` on one engine, once, and prints a line of JSON for each.

``bench_gpu.py`` starts it once a round for each engine. A row that fails ends the process, as the
GPU may be unusable afterwards; the caller starts another one for the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from gpu_record import READ

from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.prompts import time_prefill
from specbuild.cli.bench.report import Phase
from specbuild.cli.bench.runs import Run, timed_run
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.memory import footprint
from specbuild.runtime.measure.benchmark_batch import benchmark_batch, cuda_executor
from specbuild.runtime.measure.byte_floor import EngineTraffic, Work, engine_traffic
from specbuild.runtime.measure.graph_timing import time_program
from specbuild.runtime.measure.read_speed import ReadKernel, streaming_read
from specbuild.runtime.measure.routed_experts import experts_touched
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

BATCHES = (1, 16, 64)
PROMPT_TOKENS = (512, 8192)
CHAIN = DraftShape(1, 3, 3)
COST_BATCHES = (1, 16)
SAMPLED = SamplingParams(0.8, seed=1)
# Pairs of drafted steps: sampling against greedy steps, cuts against plain sampling.
COSTS = {
    "temperature 0.8": (SamplingParams(), SAMPLED),
    "min_p 0.05": (SAMPLED, SamplingParams(0.8, seed=1, min_p=0.05)),
    "top_k 40": (SAMPLED, SamplingParams(0.8, seed=1, top_k=40)),
    "top_p 0.9": (SAMPLED, SamplingParams(0.8, seed=1, top_p=0.9)),
}
_WARM_UP_TOKENS = 16
_COST_PAIRS = 2
_PROMPT_LIMIT_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """The sizes: batches, prompts, tokens of a context and an output, runs of a step."""

    batches: Sequence[int] = BATCHES
    cost_batches: Sequence[int] = COST_BATCHES
    prompt_tokens: Sequence[int] = PROMPT_TOKENS
    context: int = 1000
    tokens: int = 256
    repeats: int = 15
    chain: DraftShape = CHAIN

    def names(self, label: str, *, drafts: bool) -> list[str]:
        """Return the rows of an engine in the order of measuring."""
        shapes = (None, self.chain) if drafts else (None,)
        steps = [(batch, shape) for batch in self.batches for shape in shapes]
        result = [
            f"{label} {what}, {_work(*step)}" for what in ("step", "decoding") for step in steps
        ]
        result += [f"{label} prompt of {tokens} tokens" for tokens in self.prompt_tokens]
        if drafts:
            result += [
                f"{label} cost of {cost}, {_work(batch, self.chain)}"
                for batch in self.cost_batches
                for cost in COSTS
            ]
        return result


# Keyed by the labels of ``gpu_engines.ENGINES``.
SIZES = {
    "20B": Sizes(),
    "120B": Sizes(prompt_tokens=()),
    "120B-long": Sizes(batches=()),
}


def _work(batch: int, shape: DraftShape | None) -> str:
    draft = "no draft" if shape is None else f"chain of {shape.draft_depth}"
    return f"batch {batch}, {draft}"


@dataclass
class EngineRows:
    """The rows of a loaded engine; each method measures one and returns its message.

    ``read`` is the bandwidth of a streaming read in bytes per second, None if unknown.
    """

    label: str
    engine: Engine
    prompts: Sequence[Sequence[int]]
    read: float | None = None
    sizes: Sizes = field(default_factory=Sizes)
    _step_bytes: dict[tuple[int, DraftShape | None], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        executor = cuda_executor(self.engine)
        self._traffic: EngineTraffic = engine_traffic(executor.plan, executor.runner.described)

    def rows(self) -> dict[str, Callable[[], Mapping[str, Any]]]:
        """Return the function that measures each row, by name, in the order of ``Sizes.names``."""
        drafts = self.engine.manifest.draft is not None
        shapes = (None, self.sizes.chain) if drafts else (None,)
        steps = [(batch, shape) for batch in self.sizes.batches for shape in shapes]
        measures: list[Callable[[], Mapping[str, Any]]] = []
        measures += [lambda step=step: self._step(*step) for step in steps]  # type: ignore[misc]
        measures += [lambda step=step: self._decoding(*step) for step in steps]  # type: ignore[misc]
        measures += [lambda n=n: self._prompt(n) for n in self.sizes.prompt_tokens]  # type: ignore[misc]
        if drafts:
            measures += [
                lambda batch=batch, cost=cost: self._cost(batch, *cost)  # type: ignore[misc]
                for batch in self.sizes.cost_batches
                for cost in COSTS.values()
            ]
        names = self.sizes.names(self.label, drafts=drafts)
        return dict(zip(names, measures, strict=True))

    def _step(self, batch: int, shape: DraftShape | None) -> Mapping[str, Any]:
        """Measure a complete step with the device's clock, from one state."""
        executor = cuda_executor(self.engine)
        with benchmark_batch(
            self.engine, batch=batch, context=self.sizes.context, shape=shape
        ) as placed:
            entry = ProgramTable(executor.plan).step(shape, batch=batch, full_logits=False)
            placed.reset()
            context, experts = placed.context, experts_touched(executor, entry)
            time_s = time_program(executor.runner, entry, self.sizes.repeats, reset=placed.reset)
        rows = batch * (entry.draft_tokens + 1)
        floor = self._traffic.step(
            Work(rows, batch, context, experts),
            top_k=shape.draft_top_k if shape else 0,
            depth=shape.draft_depth if shape else 0,
        )
        self._step_bytes[batch, shape] = floor.total
        detail = {"bytes": floor.total, "experts": experts or 0.0, "context": context}
        share = self._share(floor.total, time_s)
        return _message(1e6 * time_s, "us", share=share, follows_read=True, detail=detail)

    def _decoding(self, batch: int, shape: DraftShape | None) -> Mapping[str, Any]:
        """Measure tokens per second of all sequences by the host's clock, without their prompts."""
        self._run(batch, shape, SamplingParams(), _WARM_UP_TOKENS)
        run = self._run(batch, shape, SamplingParams(), self.sizes.tokens)
        step_s = _step_s(run)
        nbytes = self._step_bytes.get((batch, shape))
        share = None if nbytes is None else self._share(nbytes, step_s)
        stats = [record.stats for record in run.records]
        detail = {
            "step_us": 1e6 * step_s,
            "tokens_a_step": sum(s.mean_acceptance_length for s in stats) / len(stats),
        }
        return _message(run.tokens_per_s, "tokens/s", share=share, follows_read=True, detail=detail)

    def _prompt(self, tokens: int) -> Mapping[str, Any]:
        """Measure the time from the call to the first token, by the host's clock."""
        phases: list[Phase] = []
        left_out: list[str] = []
        time_prefill(
            self.engine, (tokens,), Budget.of(_PROMPT_LIMIT_S, left_out), phases.append,
            traffic=self._traffic, ceiling_bytes_per_s=self.read,
        )  # fmt: skip
        if not phases:
            raise RuntimeError("; ".join(left_out))
        [phase] = phases
        return _message(1e3 * phase.time_s, "ms", share=phase.share_of_ceiling)

    def _cost(self, batch: int, base: SamplingParams, other: SamplingParams) -> Mapping[str, Any]:
        """Return the relative time of drafted steps of ``base`` to ``other``, run alternately."""
        for sampling in (base, other):
            self._run(batch, self.sizes.chain, sampling, _WARM_UP_TOKENS)
        pairs = [
            [
                self._run(batch, self.sizes.chain, sampling, self.sizes.tokens)
                for sampling in (base, other)
            ]
            for _ in range(_COST_PAIRS)
        ]
        ratio = median(_step_s(after) / _step_s(before) for before, after in pairs)
        detail = {
            "base_step_us": 1e6 * median(_step_s(before) for before, _ in pairs),
            "step_us": 1e6 * median(_step_s(after) for _, after in pairs),
            "tokens_ratio": pairs[0][1].tokens_per_s / pairs[0][0].tokens_per_s,
        }
        return _message(ratio, "times", detail=detail)

    def _run(
        self, batch: int, shape: DraftShape | None, sampling: SamplingParams, tokens: int
    ) -> Run:
        params = GenerateParams(max_new_tokens=tokens, ignore_eos=True, sampling=sampling)
        ids = [self.prompts[i % len(self.prompts)] for i in range(batch)]
        prompts = [Prompt(str(i), prompt_ids=tuple(row)) for i, row in enumerate(ids)]
        return timed_run(self.engine, prompts, params, shape)

    def _share(self, nbytes: float, time_s: float) -> float | None:
        return None if self.read is None else nbytes / time_s / self.read


def _step_s(run: Run) -> float:
    """Return the seconds of a step: the longest sequence is in all of them."""
    return run.decode_s / max(record.stats.steps for record in run.records)


def _message(
    value: float,
    unit: str,
    *,
    share: float | None = None,
    follows_read: bool = False,
    detail: Mapping[str, float] | None = None,
) -> Mapping[str, Any]:
    result = {"value": value, "unit": unit, "share": share, "follows_read": follows_read}
    return {**result, "detail": dict(detail or {})}


def report(
    rows: Mapping[str, Callable[[], Mapping[str, Any]]],
    names: Sequence[str],
    say: Callable[[Mapping[str, Any]], None],
) -> int:
    """Measure the named rows until one fails; the exit code is then 1."""
    for name in names:
        say({"begins": name})
        try:
            say({"row": name, **rows[name]()})
        except Exception as error:
            traceback.print_exc()
            say({"row": name, "error": f"{type(error).__name__}: {error}"})
            return 1
    return 0


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    """Load the engine, measure the streaming read, then the rows on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine with ENGINE.prompts.jsonl beside it")
    parser.add_argument("--label", required=True, choices=SIZES, help="what engine it is")
    parser.add_argument("--read-kernel", type=Path, help="cubin of the streaming read")
    parser.add_argument("--row", action="append", default=[], help="name of a row to measure")
    options = parser.parse_args()
    # All prompts are first, so that every sequence decodes in the timed steps.
    settings = RuntimeSettings(prefill=PrefillSchedule(steps_between=0))
    engine = Engine.load(options.engine, settings)
    executor = cuda_executor(engine)
    gpu = executor.runner.gpu
    major, minor = divmod(gpu.facts.driver_version // 10, 100)
    weights = footprint(executor.plan).weights
    _say({"gpu": gpu.facts.name, "cuda": f"{major}.{minor}", "weights_bytes": weights})
    read = None
    if options.read_kernel is not None:
        kernel = ReadKernel(options.read_kernel.read_bytes(), options.read_kernel.stem)
        read = streaming_read(gpu, kernel)
        _say({"row": READ, **_message(read / 1e12, "TB/s")})
    lines = Path(f"{options.engine}.prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt_ids"] for line in lines]
    rows = EngineRows(options.label, engine, prompts, read, SIZES[options.label]).rows()
    return report(rows, options.row, _say)


if __name__ == "__main__":
    sys.exit(main())
