"""Decodes the same sequences with every drafter of an engine in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from time import perf_counter

from specbuild.builder.progress import Progress
from specbuild.cli.bench.drafters.report import DrafterRow
from specbuild.runtime.draft.registry import AUTO, NONE
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, TokenEvent
from specbuild.runtime.statistics import StepClock

_WARM_UP_TOKENS = 8
Ids = tuple[int, ...]


@dataclass(frozen=True)
class DraftersSettings:
    """Decode ``new_tokens`` of each sequence, ``rounds`` times with each drafter."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    rounds: int

    def check(self, engine: Engine) -> None:
        """Raise SpecbuildError if the engine does not support a batch or sequence."""
        limits = engine.manifest.limits
        for batch in self.batches:
            if batch > limits.max_batch_size:
                raise SpecbuildError(
                    f"--batch {batch} is more than the engine's {limits.max_batch_size} sequences"
                )
        for context in self.contexts:
            if context + self.new_tokens > limits.max_seq_len:
                raise SpecbuildError(
                    f"--context {context} and --max-new-tokens {self.new_tokens} are more than the "
                    f"engine's {limits.max_seq_len} tokens: ask for less"
                )


@dataclass(frozen=True)
class _Run:
    """One decoding of a batch; the clock is None if steps do not run on the host."""

    records: tuple[RunRecord, ...]
    decode_s: float
    tokens: int
    clock: StepClock | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s

    @property
    def outputs(self) -> list[Ids]:
        return [record.output_ids for record in self.records]


def names_of(engine: Engine) -> tuple[str, ...]:
    """Return what is measured: no draft, each drafter alone, and with several the selection."""
    kinds = [drafter.kind for drafter in engine.manifest.drafters]
    return (NONE, *kinds, *([AUTO] if len(kinds) > 1 else []))


def measure(
    engine: Engine, text: Ids, settings: DraftersSettings, progress: Progress
) -> tuple[DrafterRow, ...]:
    """Yield rows by batch, context and drafter; sequences begin at different places of the text."""
    names = names_of(engine)
    rows: list[DrafterRow] = []
    progress.start(
        "decoding", len(settings.batches) * len(settings.contexts) * settings.rounds, "rounds"
    )
    for batch in settings.batches:
        for context in settings.contexts:
            prompts = _prompts(text, batch, context)
            for name in names:
                _decode(
                    engine, prompts, replace(settings, new_tokens=_WARM_UP_TOKENS), name, "warm-up"
                )
            rounds = []
            for number in range(settings.rounds):
                first = number % len(names)
                order = (*names[first:], *names[:first])
                rounds.append(
                    {n: _decode(engine, prompts, settings, n, f"{number}") for n in order}
                )
                progress.advance(1)
            rows += [_row(name, batch, context, rounds) for name in names]
    return tuple(rows)


def _prompts(text: Ids, batch: int, context: int) -> list[Prompt]:
    """Return pieces of the text at equal distances."""
    stride = (len(text) - context) // max(batch - 1, 1) if batch > 1 else 0
    return [
        Prompt(str(i), prompt_ids=text[i * stride : i * stride + context]) for i in range(batch)
    ]


def _decode(
    engine: Engine, prompts: Sequence[Prompt], settings: DraftersSettings, name: str, salt: str
) -> _Run:
    """Decode all prompts in one batch. Each round has its own salt, so that no prefix is cached."""
    params = GenerateParams(settings.new_tokens, ignore_eos=True, cache_salt=f"bench {salt} {name}")
    clock = engine.decoder.clock
    before = None if clock is None else replace(clock)
    begun: set[int] = set()
    records: dict[int, RunRecord] = {}
    begun_s, tokens = perf_counter(), 0
    for event in engine.generate(prompts, params, drafter=name):
        if isinstance(event, FinishEvent):
            records[event.request] = event.record
        elif isinstance(event, TokenEvent) and event.request not in begun:
            begun.add(event.request)
            begun_s, tokens = perf_counter(), 0
        else:
            tokens += 1
    decode_s = perf_counter() - begun_s
    ordered = tuple(records[i] for i in range(len(prompts)))
    passed = None if clock is None or before is None else clock.since(before)
    return _Run(ordered, decode_s, tokens, passed)


def _row(name: str, batch: int, context: int, rounds: Sequence[dict[str, _Run]]) -> DrafterRow:
    runs = [decoded[name] for decoded in rounds]
    clocks = [run.clock for run in runs if run.clock is not None and run.clock.steps]
    stats = [record.stats for run in runs for record in run.records]
    return DrafterRow(
        drafter=name,
        batch=batch,
        context=context,
        tokens_per_step=mean(s.mean_acceptance_length for s in stats),
        draft_s=median(c.draft_s / c.steps for c in clocks) if clocks else None,
        verify_s=median(c.verify_s / c.steps for c in clocks) if clocks else None,
        tokens_per_s=median(run.tokens_per_s for run in runs),
        ratio=median(decoded[name].tokens_per_s / decoded[NONE].tokens_per_s for decoded in rounds),
        same_output=all(decoded[name].outputs == decoded[NONE].outputs for decoded in rounds),
    )
