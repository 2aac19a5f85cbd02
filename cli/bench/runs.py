"""Measures tokens per second of real prompts by draft, and the time to a first answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from threading import Timer
from time import perf_counter

from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import Decoding
from specbuild.cli.bench.steps import draft_text
from specbuild.runtime.decode.decoder import Speculation
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

_WARM_UP_TOKENS = 16
_PROCESS_LIMIT_S = 300
_PROMPT_IDS = 16


@dataclass(frozen=True)
class Run:
    """One decoding of a batch; ``decode_s`` is from the last first token to the end."""

    records: tuple[RunRecord, ...]
    whole_s: float
    decode_s: float
    decode_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """The rate of all sequences, from the last first token to the end of the last sequence."""
        return self.decode_tokens / self.decode_s


@dataclass(frozen=True)
class SpecSweep:
    """Prompts decoded without a draft, with every draft, and with the engine's selection."""

    engine: Engine
    prompts: Sequence[Prompt]
    tokens: int
    rounds: int
    raw: bool = False

    def run(self, batches: Sequence[int], budget: Budget, emit: Callable[[Decoding], None]) -> None:
        """Yield one row per batch and draft; the first row of a batch is without a draft."""
        for batch in batches:
            plain: tuple[list[Run], float] | None = None
            for speculation in self._drafts(batch):
                if not budget.allows(f"spec, batch {batch}, {draft_text(speculation)}"):
                    continue
                self._decode(batch, speculation, _WARM_UP_TOKENS)
                runs = [self._decode(batch, speculation, self.tokens) for _ in range(self.rounds)]
                rate = median(run.tokens_per_s for run in runs)
                plain = plain or (runs, rate)
                emit(self._row(batch, speculation, runs, rate, plain))

    def _drafts(self, batch: int) -> list[Speculation]:
        drafts: list[Speculation] = [None]
        if self.engine.manifest.draft is None:
            return drafts
        table = ProgramTable(cuda_executor(self.engine).plan)
        drafts += [s for s in table.shapes() if table.max_sequences(s, full_logits=False) >= batch]
        return [*drafts, "default"]

    def _decode(self, batch: int, speculation: Speculation, tokens: int) -> Run:
        params = GenerateParams(max_new_tokens=tokens, ignore_eos=True, raw=self.raw)
        prompts = [self.prompts[i % len(self.prompts)] for i in range(batch)]
        prompts = [replace(prompt, id=str(i)) for i, prompt in enumerate(prompts)]
        return timed_run(self.engine, prompts, params, speculation)

    def _row(
        self,
        batch: int,
        speculation: Speculation,
        runs: Sequence[Run],
        rate: float,
        plain: tuple[list[Run], float],
    ) -> Decoding:
        plain_runs, plain_rate = plain
        plain_ids = [record.output_ids for record in plain_runs[0].records]
        stats = [record.stats for run in runs for record in run.records]
        emitted = [sum(r.stats.output_tokens for r in run.records) for run in runs]
        text = draft_text(speculation)
        if speculation == "default":
            text = f"default: {self.engine.default_draft.reason}"
        return Decoding(
            batch=batch,
            draft=text,
            tokens_per_s=rate,
            with_prompts_tokens_per_s=median(
                count / run.whole_s for count, run in zip(emitted, runs, strict=True)
            ),
            ttft_s=median(s.ttft_s for s in stats),
            mean_acceptance_length=mean(s.mean_acceptance_length for s in stats),
            ratio=rate / plain_rate,
            same_tokens=all([r.output_ids for r in run.records] == plain_ids for run in runs),
        )


def timed_run(
    engine: Engine, prompts: Sequence[Prompt], params: GenerateParams, speculation: Speculation
) -> Run:
    """Decode all prompts in one batch, timed by the host's clock."""
    started_s = begun_s = perf_counter()
    begun: set[int] = set()
    records: dict[int, RunRecord] = {}
    after = 0
    for event in engine.generate(prompts, params, speculation=speculation):
        if isinstance(event, FinishEvent):
            records[event.request] = event.record
        elif event.request in begun:
            after += 1
        else:
            begun.add(event.request)
            begun_s, after = perf_counter(), 0
    ended_s = perf_counter()
    ordered = tuple(records[i] for i in range(len(prompts)))
    return Run(ordered, ended_s - started_s, ended_s - begun_s, after)


def time_fresh_process(directory: Path, vocab: int) -> float:
    """Return the seconds from the start of ``specbuild run`` to its first and only token.

    Raises SpecbuildError if the process fails, with its message.
    """
    ids = [i % vocab for i in range(1, 1 + _PROMPT_IDS)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.jsonl"
        file.write_text(json.dumps({"id": "first", "prompt_ids": ids}) + "\n")
        command = [sys.executable, "-m", "specbuild.cli.main", "run", str(directory)]
        command += ["--prompts", str(file), "--max-new-tokens", "1", "--json"]
        started_s = perf_counter()
        # To a file, so that a process with much output does not block.
        with (Path(folder) / "said").open("w+") as messages:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True)
            limit = Timer(_PROCESS_LIMIT_S, process.kill)
            limit.start()
            with process:
                assert process.stdout is not None
                line = process.stdout.readline()
                time_s = perf_counter() - started_s
                process.communicate()
            limit.cancel()
            messages.seek(0)
            if not line:
                raise SpecbuildError(
                    f"`specbuild run {directory}` gave no token within {_PROCESS_LIMIT_S} s: "
                    f"{messages.read().strip() or 'no output'}; run it by hand"
                )
    return time_s
