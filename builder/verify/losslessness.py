"""Compares decoding with and without the draft, greedy and sampled: tokens must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbuild.builder.progress import Progress, SilentProgress
from specbuild.builder.training.self_text import Generation, generate_text
from specbuild.builder.verify.comparison import ROUTING_TIE
from specbuild.builder.verify.report import LosslessRow
from specbuild.plugins_cuda.choose.op import gumbel_noise
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.losslessness import (
    NEAR_TIE,
    Ids,
    compare_runs,
    draft_settings,
    exact_params,
)
from specbuild.runtime.request import FinishEvent, Prompt
from specbuild.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from specbuild.builder.verify.reference_target import ReferenceTarget

NEW_TOKENS = 48


@dataclass(frozen=True)
class Choice:
    """The sampling of a run."""

    name: str
    sampling: SamplingParams

    def gap(self, reference: ReferenceTarget, prefix: Ids) -> float:
        """Return the distance of the two best scores of the token after ``prefix``.

        A score is the reference's logit, or when sampling logit / temperature + gumbel(seed,
        position). It is 0 if two experts were equally good for a row of the prefix: its logits are
        then ambiguous.
        """
        states = reference.run(np.array(prefix))
        if states.routing_margin < ROUTING_TIE:
            return 0.0
        logits = torch.from_numpy(states.logits[-1])
        scores = logits
        if self.sampling.temperature > 0:
            seed, position = (
                torch.tensor([self.sampling.noise_seed]),
                torch.tensor([len(prefix) - 1]),
            )
            noise = gumbel_noise(seed, position, len(logits))[0]
            scores = logits / self.sampling.temperature + noise
        best = scores.topk(2).values
        return float(best[0] - best[1])


CHOICES = (
    Choice("greedy", SamplingParams()),
    Choice("sampled", SamplingParams(temperature=1.0, seed=11)),
)


def check_losslessness(
    engine: Engine, reference: ReferenceTarget, prompts: Sequence[Ids], progress: Progress
) -> tuple[LosslessRow, ...]:
    """Compare the plain greedy run with transformers, and every draft with the plain run."""
    ways = draft_settings(engine)
    progress.start("losslessness", len(CHOICES) * (1 + len(ways)) + 1, "runs")
    rows = []
    for choice in CHOICES:
        plain = _decode(engine, prompts, choice.sampling, DraftSetting(None))
        progress.advance(1)
        if choice.sampling.temperature == 0:
            expected = [_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
            title = "greedy: without draft = transformers"
            rows.append(_row(title, prompts, (expected, plain), reference, choice))
            progress.advance(1)
        for name, setting in ways.items():
            drafted = _decode(engine, prompts, choice.sampling, setting)
            title = f"{choice.name}: {name} = without draft"
            rows.append(_row(title, prompts, (plain, drafted), reference, choice))
            progress.advance(1)
    ties = sum(row.near_ties for row in rows)
    if ties:
        progress.note(
            f"{ties} runs part at a near tie (scores closer than {NEAR_TIE:g}, or two experts "
            f"closer than {ROUTING_TIE:g})"
        )
    return tuple(rows)


def _row(
    name: str,
    prompts: Sequence[Ids],
    runs: tuple[Sequence[Ids], Sequence[Ids]],
    reference: ReferenceTarget,
    choice: Choice,
) -> LosslessRow:
    tokens, differences, near_ties = compare_runs(
        prompts, runs, lambda prefix: choice.gap(reference, prefix)
    )
    return LosslessRow(name, len(prompts), tokens, differences, near_ties, differences == 0)


def _decode(
    engine: Engine, prompts: Sequence[Ids], sampling: SamplingParams, setting: DraftSetting
) -> list[Ids]:
    params = exact_params(engine, sampling, NEW_TOKENS)
    requests = [Prompt(id=str(i), prompt_ids=ids) for i, ids in enumerate(prompts)]
    outputs: dict[int, Ids] = {}
    for event in engine.generate(
        requests, params, speculation=setting.speculation, drafter=setting.drafter
    ):
        if isinstance(event, FinishEvent):
            outputs[event.request] = event.record.output_ids
    return [outputs[i] for i in range(len(prompts))]


def _greedy(reference: ReferenceTarget, prompt: Ids, count: int) -> Ids:
    ids, _ = generate_text(
        reference.model, torch.tensor([prompt]), Generation(new_tokens=count), SilentProgress()
    )
    return tuple(ids[0, len(prompt) :].tolist())
