"""Decoding with and without the draft: the same tokens, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbuild.builder.progress import Progress, SilentProgress
from specbuild.builder.training.self_text import Generation, generate_text
from specbuild.builder.verify.near_ties import NEAR_TIE, ROUTING_TIE
from specbuild.builder.verify.report import LosslessRow
from specbuild.plugins_cuda.choose.op import gumbel_noise
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.draft_models import shape_of
from specbuild.runtime.draft.registry import AUTO
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from specbuild.builder.verify.reference_target import ReferenceTarget

NEW_TOKENS = 48
TREE = DraftShape(draft_top_k=3, draft_depth=4, draft_tokens=10)
CHAIN_DEPTH = 4

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """How the tokens of a run were chosen."""

    name: str
    sampling: SamplingParams

    def gap(self, reference: ReferenceTarget, prefix: Ids) -> float:
        """Distance of the two best scores of the token after ``prefix``, by the reference.

        A score is the logit, or when sampling logit / temperature + gumbel(seed, position). 0
        where two experts were as good for a row of the prefix: its logits are not settled.
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
    """The plain greedy run against transformers, every way of drafting against the plain run."""
    ways = _ways(engine)
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


def compare_runs(
    prompts: Sequence[Ids],
    runs: tuple[Sequence[Ids], Sequence[Ids]],
    gap: Callable[[Ids], float],
) -> tuple[int, int, int]:
    """Tokens compared, prompts that differ at a clear choice, prompts that part at a near tie.

    ``gap`` gives the distance of the two best choices after a prefix; what follows the first
    difference of a prompt is not compared.
    """
    tokens = differences = near_ties = 0
    for prompt, plain, other in zip(prompts, *runs, strict=True):
        at = first_difference(plain, other)
        if at is not None:
            tokens += at + 1
            close = gap((*prompt, *plain[:at])) < NEAR_TIE
            near_ties += close
            differences += not close
        else:
            tokens += min(len(plain), len(other))
            differences += len(plain) != len(other)
    return tokens, differences, near_ties


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two runs chose different tokens first; None where one begins the other."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


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


def _ways(engine: Engine) -> dict[str, DraftSetting]:
    """The engine's chains and tree; suffix decoding by name where steps take it as it comes."""
    limits, models, executor = engine.manifest.limits, engine.manifest.models, engine.executor
    several = len(models) > 1
    first = models[0].kind if several else AUTO
    ways = {name: DraftSetting(shape, first) for name, shape in _shapes(engine).items()}
    for model in models[1:]:
        depth = min(CHAIN_DEPTH, limits.levels_of(model.geometry))
        chain = DraftShape(1, depth, depth)
        ways[f"{model.kind}, chain of {depth}"] = DraftSetting(chain, model.kind)
    if isinstance(executor, DeviceExecutor):
        able = ProgramTable(executor.plan).shapes()
        ways = {name: way for name, way in ways.items() if _shape(way, several=several) in able}
        ways |= {d.kind: DraftSetting(drafter=d.kind) for d in engine.manifest.host_drafters}
    return ways


def _shape(way: DraftSetting, *, several: bool) -> DraftShape:
    """What programs call the shape of a way."""
    assert isinstance(way.speculation, DraftShape) and isinstance(way.drafter, str)
    return shape_of(way.drafter if several else "", way.speculation)


def _shapes(engine: Engine) -> dict[str, DraftShape]:
    """Chains and a tree within the engine's limits; nothing where it has no drafter."""
    limits = engine.manifest.limits
    if not engine.manifest.drafters:
        return {}
    levels = limits.levels_of(engine.manifest.draft)
    depth = min(CHAIN_DEPTH, levels)
    shapes = {f"chain of {depth}": DraftShape(1, depth, depth)}
    default = engine.manifest.draft_default
    if default is not None and default.draft_top_k == 1 and default.draft_depth > depth:
        shapes[f"chain of {default.draft_depth}"] = default
    tree = _within(TREE, limits, levels)
    if tree.draft_top_k > 1 and tree.draft_tokens > 1:
        shapes[f"tree of {tree.draft_tokens}"] = tree
    return shapes


def _within(shape: DraftShape, limits: Limits, levels: int) -> DraftShape:
    top_k = min(shape.draft_top_k, limits.draft_top_k)
    depth = min(shape.draft_depth, levels)
    most = DraftShape(top_k, depth, 1).candidates
    return DraftShape(top_k, depth, min(shape.draft_tokens, limits.draft_tokens, most))


def _decode(
    engine: Engine, prompts: Sequence[Ids], sampling: SamplingParams, setting: DraftSetting
) -> list[Ids]:
    params = _params(engine, sampling)
    asked = [Prompt(id=str(i), prompt_ids=ids) for i, ids in enumerate(prompts)]
    outputs: dict[int, Ids] = {}
    for event in engine.generate(
        asked, params, speculation=setting.speculation, drafter=setting.drafter
    ):
        if isinstance(event, FinishEvent):
            outputs[event.request] = event.record.output_ids
    return [outputs[i] for i in range(len(prompts))]


def _params(engine: Engine, sampling: SamplingParams) -> GenerateParams:
    """Steps over the whole cache only, also on an engine that may verify over partial views."""
    return GenerateParams(
        max_new_tokens=NEW_TOKENS,
        sampling=sampling,
        ignore_eos=True,
        specpv_retrieval_blocks=None if engine.manifest.specpv is None else 0,
        dsa_top_k=None if engine.manifest.dsa is None else 0,
    )


def _greedy(reference: ReferenceTarget, prompt: Ids, count: int) -> Ids:
    ids, _ = generate_text(
        reference.model, torch.tensor([prompt]), Generation(new_tokens=count), SilentProgress()
    )
    return tuple(ids[0, len(prompt) :].tolist())
