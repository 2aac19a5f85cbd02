"""Tiny synthetic models, their prompts, and their output by the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 24, 161
MAX_SEQ_LEN = 512
LEVELS = 3
CHAIN = DraftShape(draft_top_k=1, draft_depth=LEVELS, draft_tokens=LEVELS)


def tiny(acceptance: float | tuple[float, float] | None, **changes: Any) -> SynthModel:
    sizes = {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, **changes}
    return SynthModel(SynthOptions("tiny", acceptance=acceptance, **sizes))


def written_prompts(path: Path) -> list[Prompt]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(line["id"], tuple(line["prompt_ids"]), None) for line in map(json.loads, lines)]


def run(engine: Engine, prompts: list[Prompt], shape: DraftShape | None) -> list[RunRecord]:
    params = GenerateParams(max_new_tokens=OUTPUT_TOKENS)
    events = engine.generate(prompts, params, speculation=shape)
    return [event.record for event in events if isinstance(event, FinishEvent)]


def successors(model: SynthModel) -> tuple[list[int], dict[int, int]]:
    """Return the next tokens of target and draft after each token, by the rules alone."""
    before = model.rules.before.tolist()
    target = [0] * len(before)
    for token, previous in enumerate(before):
        target[previous] = token
    draft = model.draft_rules
    return target, dict(zip(draft.before.tolist(), draft.vocabulary.tolist(), strict=True))
