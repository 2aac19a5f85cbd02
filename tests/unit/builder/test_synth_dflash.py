"""Synthetic DFlash drafts: every row of a block is right where the rules agree."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_chains import expected_histogram
from synthetic_models import (
    built_with_draft,
    run,
    successors,
    written_prompts,
)

from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.dflash.synth import BLOCK
from specbuild.builder.families.family import DraftSizes
from specbuild.builder.families.registry import synth_draft
from specbuild.builder.synth.geometry import named_geometry
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape

LEVELS = BLOCK - 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A model, its checkpoints, and what an engine of them gives in chains of seven."""
    model, path, engine = built_with_draft(tmp_path_factory.mktemp("synth"), "dflash", LEVELS)
    prompts = written_prompts(path / "prompts.jsonl")
    return model, path, run(engine, prompts, DraftShape(1, LEVELS, LEVELS))


@pytest.mark.slow
def test_chain_is_accepted_where_the_rules_agree(made) -> None:
    """Row d is right where the draft agrees after the true token in front of it."""
    model, _, records = made
    target, draft = successors(model)
    for record in records:
        expected = expected_histogram(record, target, draft, LEVELS)
        assert list(record.stats.acceptance_histogram) == expected


@pytest.mark.slow
def test_every_position_is_accepted_as_often_as_asked(made) -> None:
    model, _, records = made
    histogram = np.sum([record.stats.acceptance_histogram for record in records], axis=0)
    for position in range(LEVELS):
        reached, accepted = histogram[position:].sum(), histogram[position + 1 :].sum()
        assert accepted / reached == pytest.approx(model.options.acceptance, abs=0.07)


@pytest.mark.slow
def test_checkpoints_are_what_their_reader_expects(made) -> None:
    model, path, _ = made
    target = read_target(path / "target", strict=True)
    draft = read_draft(path / "draft", target.geometry, strict=True)
    assert draft.geometry == model.draft and isinstance(draft.geometry, DFlashGeometry)
    assert draft.warnings == ()


@pytest.mark.parametrize(
    ("name", "aux_layers"),
    [("gpt-oss-20b", (1, 6, 11, 16, 21)), ("gpt-oss-120b", (1, 9, 17, 25, 33))],
)
def test_sizes_are_those_of_published_drafts(name: str, aux_layers: tuple[int, ...]) -> None:
    target = named_geometry(name).target
    draft = synth_draft("dflash").geometry(target, DraftSizes(vocab=32000, inner=17280))
    assert isinstance(draft, DFlashGeometry)
    assert (draft.layers, draft.q_heads, draft.kv_heads, draft.inner) == (8, 64, 8, 7680)
    assert (draft.aux_layers, draft.block_size, draft.causal) == (aux_layers, 8, False)
