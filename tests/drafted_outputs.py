"""Greedy outputs of an engine that drafts, for comparison with decoding from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt


def drafted_outputs(
    engine: Path, prompts: Sequence[tuple[int, ...]], shape: DraftShape, *, new_tokens: int
) -> tuple[list[tuple[int, ...]], int]:
    """Each prompt's output ids, and how many of them all were accepted drafts."""
    params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True)
    asked = [Prompt(id=str(place), prompt_ids=ids) for place, ids in enumerate(prompts)]
    found, accepted = {}, 0
    for event in Engine.load(engine).generate(asked, params, speculation=shape):
        if isinstance(event, FinishEvent):
            found[int(event.request)] = tuple(event.record.output_ids)
            accepted += sum(event.record.stats.acceptance_histogram[1:])
    return [found[place] for place in range(len(prompts))], accepted
