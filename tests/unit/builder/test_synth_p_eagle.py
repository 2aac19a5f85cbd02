"""Synthetic P-EAGLE drafts: every position of a pass is right where the rules agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_chains import expected_histogram
from synthetic_models import (
    MAX_SEQ_LEN,
    PROMPTS,
    built_with_draft,
    run,
    successors,
    written_prompts,
)

from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.p_eagle.synth import POSITIONS
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.synth import build_engine
from specbuild.cli.main import main
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape

LEVELS = POSITIONS - 1
CHAIN = DraftShape(1, LEVELS, LEVELS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A model, its checkpoints, and what an engine of them gives in chains of seven."""
    model, path, engine = built_with_draft(tmp_path_factory.mktemp("synth"), "p-eagle", LEVELS)
    return model, path, run(engine, written_prompts(path / "prompts.jsonl"), CHAIN)


def test_chain_is_accepted_where_the_rules_agree(made) -> None:
    """Position d is right where the draft agrees after the true token there."""
    model, _, records = made
    target, draft = successors(model)
    for record in records:
        expected = expected_histogram(record, target, draft, LEVELS)
        assert list(record.stats.acceptance_histogram) == expected


def test_every_position_is_accepted_as_often_as_asked(made) -> None:
    model, _, records = made
    histogram = np.sum([record.stats.acceptance_histogram for record in records], axis=0)
    for position in range(LEVELS):
        reached, accepted = histogram[position:].sum(), histogram[position + 1 :].sum()
        assert accepted / reached == pytest.approx(model.options.acceptance, abs=0.07)


def test_checkpoints_are_what_their_reader_expects(made) -> None:
    model, path, _ = made
    target = read_target(path / "target", strict=True)
    draft = read_draft(path / "draft", target.geometry, strict=True)
    assert draft.geometry == model.draft and isinstance(draft.geometry, PEagleGeometry)
    assert (draft.geometry.layers, draft.geometry.kv_heads) == (4, POSITIONS)
    assert draft.warnings == ()


def test_an_engine_without_checkpoints_is_the_same(made, tmp_path: Path) -> None:
    model, path, _ = made
    options = BuildOptions(
        model=Path("tiny"),
        output=tmp_path / "engine",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
        drafting=DraftOptions(top_k=1, tokens=LEVELS),
    )
    build_engine(model, options, SilentProgress())
    one, other = (read_manifest(p) for p in (path.parent / "engine", tmp_path / "engine"))
    assert one.drafters == other.drafters
    assert one.files["weights.safetensors"] == other.files["weights.safetensors"]


def test_a_kind_needs_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--geometry", "tiny", "--draft-kind", "p-eagle", "--output", str(tmp_path / "m")]
    assert main(["synth", *arguments]) == 2
    assert "--draft-kind p-eagle needs a draft; add --draft" in capsys.readouterr().err
