"""Compare the output of an engine that drafts with transformers or with no draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specbuild.builder.training.frozen_target import load_target
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams


def drafted_outputs(
    engine: Path, prompts: Sequence[tuple[int, ...]], shape: DraftShape, *, new_tokens: int
) -> tuple[list[tuple[int, ...]], int]:
    """Return the output ids of each prompt, and the number of accepted draft tokens in all."""
    params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True)
    return _outputs(engine, prompts, shape, params)


def sampled_outputs(
    engine: Path, shape: DraftShape | None, *, new_tokens: int = 64
) -> tuple[list[tuple[int, ...]], int]:
    """Return the output ids of three prompts at temperature 1, and accepted draft tokens."""
    sampling = SamplingParams(temperature=1.0, seed=5)
    params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True, sampling=sampling)
    return _outputs(engine, [(3 + i, 7, 9) for i in range(3)], shape, params)


def check_greedy(folder: Path, shape: DraftShape) -> None:
    """Compare greedy tokens of ``folder / "engine"`` with transformers' class.

    AssertionError if a token is not the best one by the class of ``folder / "model"``, or if no
    draft token was accepted.
    """
    prompts = [tuple(range(3, 3 + count)) for count in (1, 5, 21)]
    found, accepted = drafted_outputs(folder / "engine", prompts, shape, new_tokens=64)
    model = load_target(folder / "model", teacher=False)
    for ids, output in zip(prompts, found, strict=True):
        with torch.no_grad():
            best = model(torch.tensor([ids + output]), use_cache=False).logits[0].argmax(-1)
        assert output == tuple(best[len(ids) - 1 : -1].tolist())
    assert accepted


def check_sampled(folder: Path, shapes: Sequence[DraftShape]) -> None:
    """Compare samples of ``folder / "engine"`` with and without a draft of these shapes.

    AssertionError if they differ, or if no draft token was accepted.
    """
    plain, _ = sampled_outputs(folder / "engine", None)
    accepted = 0
    for shape in shapes:
        outputs, count = sampled_outputs(folder / "engine", shape)
        assert outputs == plain, shape
        accepted += count
    assert accepted


def _outputs(
    engine: Path,
    prompts: Sequence[tuple[int, ...]],
    shape: DraftShape | None,
    params: GenerateParams,
) -> tuple[list[tuple[int, ...]], int]:
    asked = [Prompt(id=str(place), prompt_ids=ids) for place, ids in enumerate(prompts)]
    found, accepted = {}, 0
    for event in Engine.load(engine).generate(asked, params, speculation=shape):
        if isinstance(event, FinishEvent):
            found[int(event.request)] = tuple(event.record.output_ids)
            accepted += sum(event.record.stats.acceptance_histogram[1:])
    return [found[place] for place in range(len(prompts))], accepted
