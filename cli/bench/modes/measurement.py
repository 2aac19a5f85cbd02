"""Evaluates a text and decodes after its contexts with the engine of every mode in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specbuild.builder.progress import Progress
from specbuild.cli.bench.modes.engines import Mode
from specbuild.cli.bench.modes.report import ModeRow
from specbuild.cli.bench.pairs import decoded
from specbuild.cli.compare.measurement import logits_behind
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.fidelity import log_softmax
from specbuild.runtime.records import RunStats
from specbuild.runtime.request import GenerateParams, Prompt

_WARM_UP_TOKENS = 8
Ids = tuple[int, ...]


@dataclass(frozen=True)
class ModesSettings:
    """Evaluate ``judged`` tokens after each context, and decode ``new_tokens`` there."""

    contexts: tuple[int, ...]
    judged: int
    new_tokens: int
    rounds: int

    @property
    def longest(self) -> int:
        """The number of tokens of the text that are used, and of a sequence."""
        return max(self.contexts) + max(self.judged, self.new_tokens)


@dataclass(frozen=True)
class Judged:
    """The loss in nats and the likeliest token of every evaluated row, [rows] each."""

    loss: np.ndarray
    likeliest: np.ndarray


def measure(
    engines: Mapping[Mode, Engine], text: Ids, settings: ModesSettings, progress: Progress
) -> tuple[ModeRow, ...]:
    """Yield the rows of every context, modes in order. The text has ``longest`` tokens."""
    rows: list[ModeRow] = []
    reads = len(engines) * len(settings.contexts)
    progress.start("reading", reads, "texts")
    judged: dict[tuple[Mode, int], Judged] = {}
    for context in settings.contexts:
        for mode, engine in engines.items():
            judged[mode, context] = _judged(engine, text[: context + settings.judged], context)
            progress.advance(1)
    progress.start("decoding", reads * settings.rounds, "prompts")
    for context in settings.contexts:
        prompt = Prompt(f"{context}", prompt_ids=text[:context])
        rounds = _rounds(engines, prompt, settings, progress)
        first = next(iter(engines))
        for mode in engines:
            mode_runs = [found[mode] for found in rounds]
            ratios = [_rate(found[mode]) / _rate(found[first]) for found in rounds]
            mode_rows, reference = judged[mode, context], judged[first, context]
            rows.append(
                ModeRow(
                    mode=mode.name,
                    context=context,
                    tokens_per_s=median(map(_rate, mode_runs)),
                    over_first=median(ratios),
                    ttft_s=median(stats.ttft_s for stats in mode_runs),
                    tokens_per_step=median(stats.mean_acceptance_length for stats in mode_runs),
                    perplexity=float(np.exp(mode_rows.loss.mean())),
                    agreement=float((mode_rows.likeliest == reference.likeliest).mean()),
                )
            )
    return tuple(rows)


def _judged(engine: Engine, text: Ids, context: int) -> Judged:
    """Return the rows from the context's last token to the text's second-to-last token."""
    losses, likeliest = [], []
    for first, logits in logits_behind(engine, text, context):
        at = np.arange(first, first + len(logits))
        keep = (at >= context - 1) & (at < len(text) - 1)
        if keep.any():
            following = np.array(text)[at[keep] + 1]
            rows = log_softmax(logits[keep])
            losses.append(-rows[np.arange(len(following)), following])
            likeliest.append(rows.argmax(axis=1))
    return Judged(np.concatenate(losses), np.concatenate(likeliest))


def _rounds(
    engines: Mapping[Mode, Engine], prompt: Prompt, settings: ModesSettings, progress: Progress
) -> list[dict[Mode, RunStats]]:
    """Each round has every mode once, in a rotated order."""
    params = GenerateParams(max_new_tokens=settings.new_tokens, ignore_eos=True)
    warm_up = GenerateParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    for engine in engines.values():
        decoded(engine, prompt, warm_up, DraftSetting())
    found: list[dict[Mode, RunStats]] = []
    order: Sequence[Mode] = list(engines)
    for number in range(settings.rounds):
        begins = number % len(order)
        round_stats = {}
        for mode in (*order[begins:], *order[:begins]):
            round_stats[mode] = decoded(engines[mode], prompt, params, DraftSetting()).stats
            progress.advance(1)
        found.append(round_stats)
    return found


def _rate(stats: RunStats) -> float:
    """The tokens per second after the first one."""
    assert stats.tpot_s is not None
    return 1 / stats.tpot_s
