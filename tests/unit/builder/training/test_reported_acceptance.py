"""The acceptance that training reports equals the acceptance in an engine."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import write_target

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import SelfText, TrainOptions
from specbuild.builder.training.draft import train_draft
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

PROMPT, LENGTH = 8, 64


@pytest.mark.slow
def test_reported_acceptance_equals_that_of_the_engine(tmp_path, monkeypatch):
    write_target(tmp_path / "target", hidden=64, vocab=64)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 64, 6000))
    options = TrainOptions(
        model=tmp_path / "target",
        texts=(tmp_path / "ids.npy",),
        output=tmp_path / "draft",
        steps=100,
        sequence_length=LENGTH,
        learning_rate=3e-3,
        draft_vocab=60,
        inner=64,
        held_out_fraction=0.1,
        held_out_rows=24,
        self_text=SelfText(count=60, prompt_tokens=PROMPT),
        seed=1,
    )
    measured = []
    monkeypatch.setattr("specbuild.builder.training.draft.write_rows", _recorded(measured))
    reported = train_draft(options, SilentProgress()).held_out_self_text
    build(
        BuildOptions(
            model=options.model,
            draft=options.output,
            output=tmp_path / "engine",
            limits=LimitOptions(max_seq_len=128),
        ),
        SilentProgress(),
    )
    prompts = [Prompt(str(i), prompt_ids=tuple(ids[:PROMPT])) for i, ids in enumerate(measured)]
    params = GenerateParams(max_new_tokens=LENGTH - PROMPT)
    events = Engine.load(tmp_path / "engine").generate(
        prompts, params, speculation=DraftShape(1, reported.chain, reported.chain)
    )
    stats = [event.record.stats for event in events if isinstance(event, FinishEvent)]
    steps = sum(s.steps for s in stats)
    reached = sum(s.mean_acceptance_length * s.steps for s in stats) / steps
    assert reported.mean_acceptance_length > 1.15
    # The last tokens of rows are not measured, and the engine's weights are rounded to bf16.
    assert reached == pytest.approx(reported.mean_acceptance_length, abs=0.04)


def _recorded(measured: list):
    """Return ``write_rows`` that stores the ids of the last written rows, which are held out."""
    from specbuild.builder.training.self_text import write_rows

    def write(*args, **kwargs):
        rows = write_rows(*args, **kwargs)
        measured[:] = rows.ids.tolist()
        return rows

    return write
