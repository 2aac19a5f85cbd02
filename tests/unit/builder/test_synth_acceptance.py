"""Synthetic drafts whose acceptance differs between prompts."""

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
    """Return the draft's accuracy after each prompt, up to the beginning of the next prompt."""
    target, draft = successors(model)
    length = len(model.rules.cycle) // model.options.prompts
    results = []
    for ids in model.prompts():
        token, right = ids[-1], 0
        for _ in range(length):
            right += draft[token] == target[token]
            token = target[token]
        results.append(right / length)
    return results


def test_each_prompt_has_a_different_acceptance() -> None:
    model = tiny((0.4, 0.9), prompts=8)
    requested = model.prompt_acceptances
    assert sorted(requested) == pytest.approx([0.4 + 0.5 * (i + 0.5) / 8 for i in range(8)])
    assert requested != sorted(requested)
    assert shares(model) == pytest.approx(requested, abs=0.06)
    assert tiny((0.4, 0.9), prompts=8, seed=1).prompt_acceptances != requested


def test_a_range_changes_the_draft_only() -> None:
    ranged, fixed = tiny((0.2, 0.8)), tiny(0.5)
    assert ranged.prompts() == fixed.prompts()
    assert ranged.rules.before.equal(fixed.rules.before)
    vocabulary = set(ranged.draft_rules.vocabulary.tolist())
    draft = successors(ranged)[1]
    assert set(draft) == set(draft.values()) == vocabulary


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("both", [0.0, 1.0])
def test_a_range_of_one_value(count: int, both: float) -> None:
    assert shares(tiny((both, both), prompts=count)) == [both] * count


def test_outputs_have_the_acceptance_of_their_prompt(tmp_path: Path) -> None:
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


def test_parses_a_range() -> None:
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
