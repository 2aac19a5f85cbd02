"""P-EAGLE on a GPU: a synthetic draft is accepted where its rules agree, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_engine import on_gpu
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, run, successors, tiny

from specbuild.builder.families.p_eagle.synth import POSITIONS
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.synth import build_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import Prompt

LEVELS = POSITIONS - 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SynthModel, Engine]]:
    model = tiny(0.78, draft_kind="p-eagle")
    options = BuildOptions(
        model=Path("tiny"),
        output=tmp_path_factory.mktemp("p-eagle") / "engine",
        backend="cuda",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=4),
        drafting=DraftOptions(top_k=1, tokens=LEVELS),
    )
    build_engine(model, options, SilentProgress())
    with on_gpu(options.output) as engine:
        yield model, engine


@pytest.mark.parametrize("depth", [None, 1, 4, LEVELS])
def test_tokens_and_accepted_drafts_are_those_of_the_rules(
    made: tuple[SynthModel, Engine], depth: int | None
) -> None:
    """Sequences in company, whose steps accept any number of drafts."""
    model, engine = made
    target, draft = successors(model)
    shape = None if depth is None else DraftShape(1, depth, depth)
    prompts = [Prompt(str(i), tuple(ids), None) for i, ids in enumerate(model.prompts()[:6])]
    for record in run(engine, prompts, shape):
        expected = expected_histogram(record, target, draft, depth or 0)
        assert list(record.stats.acceptance_histogram) == expected
