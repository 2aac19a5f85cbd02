"""Synthetic MTP layers: every level is right where the rules agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, run, successors

from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import build_engine, write_checkpoints
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import Prompt

LEVELS = 4


def made(geometry: str) -> SynthModel:
    return SynthModel(
        SynthOptions(geometry, acceptance=0.78, draft_kind="mtp", prompts=4, prompt_tokens=24)
    )


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["tiny-mimo", "tiny-mla"])
def test_chains_are_accepted_where_the_rules_agree(tmp_path: Path, geometry: str) -> None:
    model = made(geometry)
    options = BuildOptions(
        model=Path(geometry),
        output=tmp_path / "engine",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=4),
        drafting=DraftOptions(top_k=1, tokens=LEVELS),
    )
    build_engine(model, options, SilentProgress())
    engine = Engine.load(options.output)
    target, draft = successors(model)
    prompts = [Prompt(str(i), tuple(ids), None) for i, ids in enumerate(model.prompts())]
    for record in run(engine, prompts, DraftShape(1, LEVELS, LEVELS)):
        expected = expected_histogram(record, target, draft, LEVELS)
        assert list(record.stats.acceptance_histogram) == expected


def test_sizes_are_those_of_the_published_layer() -> None:
    model = made("mimo-7b")
    assert isinstance(model.draft, MtpGeometry)
    assert (model.draft.kv_heads, model.draft.head_dim, model.draft.aux_layers) == (8, 128, (35,))
    count = sum(tensor.nbytes // 2 for tensor in model.draft_tensors.values())
    assert count / 1e9 == pytest.approx(0.211, abs=0.001)


def test_what_it_is_not_made_of(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match="--draft-kind mtp: a gpt_oss has no MTP layer"):
        made("tiny")
    with pytest.raises(SpecbuildError, match="--draft-kind mtp needs --engine"):
        write_checkpoints(made("tiny-mimo"), tmp_path / "m", SilentProgress(), force=False)
