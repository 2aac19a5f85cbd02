"""Speed with and without the draft, measured in interleaved pairs of the same prompt."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specbuild.builder.progress import Progress, SilentProgress
from specbuild.cli.options.draft_choice import describe_shape
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import DsaStats, RunRecord, RunStats, SpecPvStats
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

_WARM_UP_TOKENS = 16
_PLAIN = DraftSetting(None)
RANDOM_TOKENS = "random tokens"  # The name of the prompt set if the user gave no text.
_RANDOM_PROMPT_LENGTHS = (16, 32, 64, 128)


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured and reported together."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Speed:
    """One decode of one prompt."""

    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float | None


@dataclass(frozen=True)
class Pair:
    """One prompt decoded without and with the draft, in direct succession.

    ``ratio`` is speed with the draft divided by speed without. ``with_draft`` and values derived
    from it are None for an engine without a draft. ``specpv`` and ``dsa`` are of the run with the
    draft, if there is one; they are None for an engine without SpecPV or DSA. ``prompt_digest`` is
    the digest of the prompt's token ids.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    without_draft: Speed
    with_draft: Speed | None
    ratio: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: tuple[int, ...]
    same_output: bool | None
    specpv: SpecPvStats | None = None
    dsa: DsaStats | None = None
    prompt_digest: str = ""


@dataclass(frozen=True)
class SetReport:
    """Medians over the pairs of one prompt set; the histogram is their sum."""

    name: str
    without_draft_tokens_per_s: float
    with_draft_tokens_per_s: float | None
    ratio: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: tuple[int, ...]
    ttft_without_draft_s: float
    ttft_with_draft_s: float | None
    same_output: int
    pairs: tuple[Pair, ...]
    acceptance_length_against: float | None = None


@dataclass(frozen=True)
class BenchReport:
    """The output of ``bench pairs --json``; ``ratio`` is the median over all pairs of all sets.

    ``draft_dtype`` is the engine's storage of the draft's weights, ``shape`` the draft of all
    steps, None if steps differ or have none. ``against_dtype`` and ``acceptance_length_against`` of
    each set are from the report of ``--against``.
    """

    max_new_tokens: int
    rounds: int
    draft: str
    ratio: float | None
    sets: tuple[SetReport, ...]
    draft_dtype: str | None = None
    against_dtype: str | None = None
    shape: DraftShape | None = None


def set_title(entry: SetReport, report: BenchReport) -> str:
    """Return what tables and charts call a prompt set: its name only if there are several."""
    prompts = len(entry.pairs) // report.rounds
    count = "1 prompt" if prompts == 1 else f"{prompts} prompts"
    if len(report.sets) > 1:
        return f"{entry.name.replace('_', ' ').replace('-', ' ')}, {count}"
    return f"{count} of {entry.name}" if entry.name == RANDOM_TOKENS else count


@dataclass(frozen=True)
class PairsSettings:
    """The measurement: greedy decoding of each prompt, ``rounds`` times each way."""

    max_new_tokens: int
    rounds: int
    setting: DraftSetting
    raw: bool = False

    @property
    def params(self) -> GenerateParams:
        """Return parameters with outputs of full length, so that both ways do the same work."""
        return GenerateParams(max_new_tokens=self.max_new_tokens, ignore_eos=True, raw=self.raw)


def random_prompts(vocab: int, longest: int, *, seed: int) -> PromptSet:
    """Return prompts of random token ids, if the user gave no text."""
    generator = random.Random(seed)
    lengths = sorted({min(length, longest) for length in _RANDOM_PROMPT_LENGTHS})
    prompts = tuple(
        Prompt(
            id=f"random-{length}",
            prompt_ids=tuple(generator.randrange(vocab) for _ in range(length)),
        )
        for length in lengths
    )
    return PromptSet(RANDOM_TOKENS, prompts)


def measure(
    engine: Engine,
    sets: Sequence[PromptSet],
    settings: PairsSettings,
    progress: Progress | None = None,
) -> BenchReport:
    """Decode every prompt both ways, alternating which way goes first."""
    progress = SilentProgress() if progress is None else progress
    progress.start("warming up", 1, "prompt")
    _warm_up(engine, sets[0].prompts[0], settings)
    progress.start("measuring", settings.rounds * sum(len(s.prompts) for s in sets), "pairs")
    reports = tuple(_measure_set(engine, prompt_set, settings, progress) for prompt_set in sets)
    ratios = [pair.ratio for report in reports for pair in report.pairs if pair.ratio is not None]
    speculation = settings.setting.speculation
    draft = _draft_text(engine, settings.setting)
    stored = engine.manifest.draft
    dtype = None if stored is None or speculation is None else stored.dtype
    shape = speculation if isinstance(speculation, DraftShape) else None
    return BenchReport(
        settings.max_new_tokens,
        settings.rounds,
        draft,
        _median(ratios),
        reports,
        dtype,
        shape=shape,
    )


def _draft_text(engine: Engine, setting: DraftSetting) -> str:
    if setting.speculation is None:
        return "none"
    if setting.speculation == "default":
        return engine.default_draft.reason
    return describe_shape(setting.speculation)


def _warm_up(engine: Engine, prompt: Prompt, settings: PairsSettings) -> None:
    params = GenerateParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True, raw=settings.raw)
    for setting in (_PLAIN, settings.setting):
        decoded(engine, prompt, params, setting)


def _measure_set(
    engine: Engine, prompt_set: PromptSet, settings: PairsSettings, progress: Progress
) -> SetReport:
    pairs = []
    for round_index in range(settings.rounds):
        for i, prompt in enumerate(prompt_set.prompts):
            pairs.append(
                _measure_pair(engine, prompt, settings, draft_first=(round_index + i) % 2 == 1)
            )
            progress.advance(1)
    return summarise(prompt_set.name, pairs)


def _measure_pair(
    engine: Engine, prompt: Prompt, settings: PairsSettings, *, draft_first: bool
) -> Pair:
    if settings.setting.speculation is None:
        return _pair(decoded(engine, prompt, settings.params, _PLAIN), None)
    if draft_first:
        drafted = decoded(engine, prompt, settings.params, settings.setting)
        return _pair(decoded(engine, prompt, settings.params, _PLAIN), drafted)
    plain = decoded(engine, prompt, settings.params, _PLAIN)
    return _pair(plain, decoded(engine, prompt, settings.params, settings.setting))


def decoded(
    engine: Engine, prompt: Prompt, params: GenerateParams, setting: DraftSetting
) -> RunRecord:
    """Return the record of one prompt, alone on the engine."""
    events = engine.generate(
        [prompt], params, speculation=setting.speculation, drafter=setting.drafter
    )
    for event in events:
        if isinstance(event, FinishEvent):
            return event.record
    raise RuntimeError("the engine ended a request without its record")


def _pair(plain: RunRecord, drafted: RunRecord | None) -> Pair:
    return Pair(
        id=plain.id,
        prompt_tokens=plain.stats.prompt_tokens,
        output_tokens=plain.stats.output_tokens,
        without_draft=_speed(plain.stats),
        with_draft=None if drafted is None else _speed(drafted.stats),
        ratio=None
        if drafted is None
        else drafted.stats.output_tokens_per_s / plain.stats.output_tokens_per_s,
        mean_acceptance_length=None if drafted is None else drafted.stats.mean_acceptance_length,
        acceptance_histogram=() if drafted is None else drafted.stats.acceptance_histogram,
        same_output=None if drafted is None else drafted.output_ids == plain.output_ids,
        specpv=(drafted or plain).stats.specpv,
        dsa=(drafted or plain).stats.dsa,
        prompt_digest=hashlib.sha256(np.array(plain.prompt_ids, "<i4").tobytes()).hexdigest(),
    )


def _speed(stats: RunStats) -> Speed:
    return Speed(stats.output_tokens_per_s, stats.ttft_s, stats.tpot_s)


def summarise(name: str, pairs: Sequence[Pair]) -> SetReport:
    """Return the medians of a prompt set."""
    return SetReport(
        name=name,
        without_draft_tokens_per_s=median(p.without_draft.output_tokens_per_s for p in pairs),
        with_draft_tokens_per_s=_median(
            p.with_draft.output_tokens_per_s for p in pairs if p.with_draft is not None
        ),
        ratio=_median(p.ratio for p in pairs if p.ratio is not None),
        mean_acceptance_length=_median(
            p.mean_acceptance_length for p in pairs if p.mean_acceptance_length is not None
        ),
        acceptance_histogram=_sum_histograms([p.acceptance_histogram for p in pairs]),
        ttft_without_draft_s=median(p.without_draft.ttft_s for p in pairs),
        ttft_with_draft_s=_median(p.with_draft.ttft_s for p in pairs if p.with_draft is not None),
        same_output=sum(p.same_output is not False for p in pairs),
        pairs=tuple(pairs),
    )


def _median(values: Iterable[float]) -> float | None:
    present = list(values)
    return median(present) if present else None


def _sum_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max((len(histogram) for histogram in histograms), default=0)
    return tuple(
        sum(histogram[i] for histogram in histograms if i < len(histogram)) for i in range(longest)
    )
