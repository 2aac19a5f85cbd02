"""Reads a text and decodes behind its contexts with every mode's engine in turn."""

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
    """``judged`` tokens behind each context are predicted, ``new_tokens`` decoded there."""

    contexts: tuple[int, ...]
    judged: int
    new_tokens: int
    rounds: int

    @property
    def longest(self) -> int:
        """Tokens of the text that are read, and of a sequence."""
        return max(self.contexts) + max(self.judged, self.new_tokens)


@dataclass(frozen=True)
class Judged:
    """Of every judged row the loss in nats and the likeliest token, [rows] each."""

    loss: np.ndarray
    likeliest: np.ndarray


def measure(
    engines: Mapping[Mode, Engine], text: Ids, plan: ModesSettings, progress: Progress
) -> tuple[ModeRow, ...]:
    """The rows of every context, modes in the order given. The text has ``longest`` tokens."""
    rows: list[ModeRow] = []
    reads = len(engines) * len(plan.contexts)
    progress.start("reading", reads, "texts")
    judged: dict[tuple[Mode, int], Judged] = {}
    for context in plan.contexts:
        for mode, engine in engines.items():
            judged[mode, context] = _judged(engine, text[: context + plan.judged], context)
            progress.advance(1)
    progress.start("decoding", reads * plan.rounds, "prompts")
    for context in plan.contexts:
        prompt = Prompt(f"{context}", prompt_ids=text[:context])
        rounds = _rounds(engines, prompt, plan, progress)
        first = next(iter(engines))
        for mode in engines:
            of_mode = [found[mode] for found in rounds]
            ratios = [_rate(found[mode]) / _rate(found[first]) for found in rounds]
            seen, reference = judged[mode, context], judged[first, context]
            rows.append(
                ModeRow(
                    mode=mode.name,
                    context=context,
                    tokens_per_s=median(map(_rate, of_mode)),
                    over_first=median(ratios),
                    ttft_s=median(stats.ttft_s for stats in of_mode),
                    tokens_per_step=median(stats.mean_acceptance_length for stats in of_mode),
                    perplexity=float(np.exp(seen.loss.mean())),
                    agreement=float((seen.likeliest == reference.likeliest).mean()),
                )
            )
    return tuple(rows)


def _judged(engine: Engine, text: Ids, context: int) -> Judged:
    """The rows from the context's last token on, but for the text's last one."""
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
    engines: Mapping[Mode, Engine], prompt: Prompt, plan: ModesSettings, progress: Progress
) -> list[dict[Mode, RunStats]]:
    """Each round has every mode once; who begins changes."""
    params = GenerateParams(max_new_tokens=plan.new_tokens, ignore_eos=True)
    warm_up = GenerateParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    for engine in engines.values():
        decoded(engine, prompt, warm_up, DraftSetting())
    found: list[dict[Mode, RunStats]] = []
    order: Sequence[Mode] = list(engines)
    for number in range(plan.rounds):
        begins = number % len(order)
        taken = {}
        for mode in (*order[begins:], *order[:begins]):
            taken[mode] = decoded(engines[mode], prompt, params, DraftSetting()).stats
            progress.advance(1)
        found.append(taken)
    return found


def _rate(stats: RunStats) -> float:
    """Tokens a second behind the first one."""
    assert stats.tpot_s is not None
    return 1 / stats.tpot_s
