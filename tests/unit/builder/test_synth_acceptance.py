"""Synthetic drafts whose acceptance differs from prompt to prompt."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_models import (
    CHAIN,
    LEVELS,
    MAX_SEQ_LEN,
    PROMPTS,
    run,
    successors,
    tiny,
    written_prompts,
)

from specbuild.builder.option_readers import probabilities
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import build_engine, prompts_beside
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError


def shares(model: SynthModel) -> list[float]:
    """How often the draft is right behind each prompt, up to where the next one begins."""
    target, draft = successors(model)
    length = len(model.rules.cycle) // model.options.prompts
    found = []
    for ids in model.prompts():
        token, right = ids[-1], 0
        for _ in range(length):
            right += draft[token] == target[token]
            token = target[token]
        found.append(right / length)
    return found


def test_every_prompt_has_its_own_acceptance() -> None:
    model = tiny((0.4, 0.9), prompts=8)
    asked = model.prompt_acceptances
    assert sorted(asked) == pytest.approx([0.4 + 0.5 * (i + 0.5) / 8 for i in range(8)])
    assert asked != sorted(asked)
    assert shares(model) == pytest.approx(asked, abs=0.06)
    assert tiny((0.4, 0.9), prompts=8, seed=1).prompt_acceptances != asked


def test_a_range_changes_the_draft_alone() -> None:
    ranged, fixed = tiny((0.2, 0.8)), tiny(0.5)
    assert ranged.prompts() == fixed.prompts()
    assert ranged.rules.before.equal(fixed.rules.before)
    vocabulary = set(ranged.draft_rules.vocabulary.tolist())
    draft = successors(ranged)[1]
    assert set(draft) == set(draft.values()) == vocabulary


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("both", [0.0, 1.0])
def test_ends_that_are_equal(count: int, both: float) -> None:
    assert shares(tiny((both, both), prompts=count)) == [both] * count


def test_outputs_are_accepted_by_their_own_rate(tmp_path: Path) -> None:
    model = tiny((0.1, 0.95))
    options = BuildOptions(
        model=tmp_path,
        output=tmp_path / "engine",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
        drafting=DraftOptions(top_k=1, depth=LEVELS, tokens=LEVELS),
    )
    build_engine(model, options, SilentProgress())
    records = run(
        Engine.load(options.output), written_prompts(prompts_beside(options.output)), CHAIN
    )
    by_prompt = {int(record.id): record for record in records}
    rates = [by_prompt[i].stats.acceptance_per_position[0] for i in range(PROMPTS)]
    assert np.corrcoef(rates, model.prompt_acceptances)[0, 1] > 0.9
    assert max(rates) - min(rates) > 0.5


def test_a_range_is_read() -> None:
    assert probabilities("--acceptance", "0.4:0.9") == (0.4, 0.9)
    assert probabilities("--acceptance", 0.7) == probabilities("--acceptance", "0.7") == 0.7
    assert SynthOptions.from_given({"geometry": "tiny", "acceptance": "0:1"}).acceptance == (0, 1)
    for text in ("0.9:0.4", "1.2", "a", "0.1:0.2:0.3", "-0.1:0.5", "", "nan"):
        with pytest.raises(
            SpecbuildError, match=re.escape(f"--acceptance {text} is no probability")
        ):
            probabilities("--acceptance", text)
    with pytest.raises(SpecbuildError, match=re.escape("0.5:1.5 is no probability")):
        tiny((0.5, 1.5))
