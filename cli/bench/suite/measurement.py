"""Runs the scenarios of a suite on one engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from specbuild.cli.bench.runs import Run, timed_run
from specbuild.cli.bench.suite.report import Attempt, ScenarioReport, SuiteReport, misses
from specbuild.cli.bench.suite.scenarios import Scenario, Suite
from specbuild.cli.terminal.prompt_file import read_prompt_file, tokenised
from specbuild.runtime.decode.decoder import Speculation
from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.byte_floor import EngineTraffic, Work
from specbuild.runtime.request import GenerateParams, Prompt

_RANDOM_SEED = 1
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ByteFloor:
    """The bytes of a step without a draft, and the bandwidth of a streaming read on this GPU."""

    traffic: EngineTraffic
    bytes_per_s: float

    def step_s(self, batch: int, context: float) -> float:
        """Return the seconds of reading the bytes of a step of ``batch`` sequences."""
        return self.traffic.step(Work(batch, batch, context)).total / self.bytes_per_s


@dataclass(frozen=True)
class SuiteRun:
    """Runs scenarios; ``floor`` is None if there is none.

    ``records`` are stored tokens per second by scenario, and ``prompts`` are for scenarios that
    name none. ``launched`` has the number of runs of each program so far.
    """

    engine: Engine
    folder: Path
    prompts: Path | None
    floor: ByteFloor | None
    records: Mapping[str, float]
    launched: Callable[[], Mapping[str, int]]
    say: Callable[[str], None]

    def run(self, suite: Suite, *, name: str, device: str) -> SuiteReport:
        """Yield the results of all scenarios, in order."""
        results = tuple(self._scenario(scenario) for scenario in suite.scenarios)
        return SuiteReport(suite.suite, name, device, results)

    def _scenario(self, scenario: Scenario) -> ScenarioReport:
        started_s, before = perf_counter(), dict(self.launched())
        unable = self._unable(scenario)
        if unable is not None:
            self.say(f"{scenario.name}: skipped, {unable}")
            return ScenarioReport(scenario.name, "skipped", (unable,), (), 0.0, 0.0, {})
        prompts = self._prompts(scenario)
        for speculation in (None, scenario.speculation):
            self._decode(prompts, _WARM_UP_TOKENS, speculation)
        attempts: list[Attempt] = []
        reasons: tuple[str, ...] = ()
        in_a_row = 0
        while in_a_row < scenario.passes and len(attempts) < scenario.attempts:
            attempts.append(self._attempt(scenario, prompts, draft_first=len(attempts) % 2 == 1))
            reasons = misses(attempts[-1], scenario.thresholds, self.records.get(scenario.name))
            in_a_row = 0 if reasons else in_a_row + 1
            verdict = "; ".join(reasons) or f"{in_a_row} of {scenario.passes} passes"
            self.say(f"{scenario.name}: {attempts[-1].tokens_per_s:.1f} tokens/s, {verdict}")
        passed = in_a_row == scenario.passes
        if not passed and not reasons:
            reasons = (f"{in_a_row} passes in a row at the end, {scenario.passes} are wanted",)
        programs = {
            program: count - before.get(program, 0)
            for program, count in self.launched().items()
            if count > before.get(program, 0)
        }
        return ScenarioReport(
            name=scenario.name,
            verdict="passed" if passed else "missed",
            reasons=() if passed else reasons,
            attempts=tuple(attempts),
            tokens_per_s=median(a.tokens_per_s for a in attempts),
            seconds=perf_counter() - started_s,
            programs=programs,
        )

    def _unable(self, scenario: Scenario) -> str | None:
        """Return why this engine cannot run a scenario, or None if it can."""
        limits, max_tokens = self.engine.manifest.limits, scenario.context + scenario.output_tokens
        if max_tokens > limits.max_seq_len:
            return f"it wants {max_tokens} tokens, the engine takes {limits.max_seq_len}"
        if scenario.batch > limits.max_batch_size:
            return f"it wants {scenario.batch} sequences, the engine takes {limits.max_batch_size}"
        if scenario.speculation is not None and self.engine.manifest.draft is None:
            return "the engine has no draft"
        return None

    def _prompts(self, scenario: Scenario) -> list[Prompt]:
        """Return as many prompts as the batch needs, each with the scenario's length."""
        prompt_file = None if scenario.prompts is None else self.folder / scenario.prompts
        file = prompt_file or self.prompts
        if file is None:
            generator, vocab = random.Random(_RANDOM_SEED), self.engine.manifest.target.vocab
            ids = [
                tuple(generator.randrange(vocab) for _ in range(scenario.context))
                for _ in range(scenario.batch)
            ]
        else:
            placed = read_prompt_file(file)
            texts = [p.prompt_ids for p in tokenised(self.engine, placed, GenerateParams())]
            ids = [
                tuple(islice(cycle(text or ()), scenario.context))
                for text in islice(cycle(texts), scenario.batch)
            ]
        return [Prompt(f"{scenario.name} {i}", prompt_ids=tokens) for i, tokens in enumerate(ids)]

    def _attempt(self, scenario: Scenario, prompts: list[Prompt], *, draft_first: bool) -> Attempt:
        speculation, tokens = scenario.speculation, scenario.output_tokens
        ways = [None, speculation] if speculation is not None else [None]
        if draft_first:
            ways.reverse()
        runs = {way: self._decode(prompts, tokens, way) for way in ways}
        plain, run = runs[None], runs[speculation]
        of_floor = None
        if self.floor is not None:
            context = scenario.context + tokens / 2
            step_s = scenario.batch / plain.tokens_per_s
            of_floor = self.floor.step_s(scenario.batch, context) / step_s
        drafted = speculation is not None
        stats = [record.stats for record in run.records]
        same = [r.output_ids for r in run.records] == [r.output_ids for r in plain.records]
        return Attempt(
            tokens_per_s=run.tokens_per_s,
            without_draft_tokens_per_s=plain.tokens_per_s,
            ttft_s=median(s.ttft_s for s in stats),
            over_no_draft=run.tokens_per_s / plain.tokens_per_s if drafted else None,
            tokens_per_step=mean(s.mean_acceptance_length for s in stats) if drafted else None,
            same_output=same if drafted else None,
            byte_floor_ratio=of_floor,
        )

    def _decode(self, prompts: list[Prompt], tokens: int, speculation: Speculation) -> Run:
        params = GenerateParams(max_new_tokens=tokens, ignore_eos=True)
        return timed_run(self.engine, prompts, params, speculation)
