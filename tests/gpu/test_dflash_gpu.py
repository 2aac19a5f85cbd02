"""DFlash on a GPU: it drafts what the CPU engine drafts, and changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_engine import on_gpu
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, run, successors, tiny

from specbuild.builder.families.dflash.synth import BLOCK
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.synth import build_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import Prompt

LEVELS, BATCH = BLOCK - 1, 4
TREE = DraftShape(3, LEVELS, 12)


def engine_for(
    folder: Path, model: SynthModel, backend: str, built_for: DraftShape
) -> BuildOptions:
    options = BuildOptions(
        model=Path("tiny"),
        output=folder / f"{backend}-{built_for.draft_top_k}",
        backend=backend,  # type: ignore[arg-type]
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=BATCH),
        drafting=DraftOptions(
            top_k=built_for.draft_top_k, depth=LEVELS, tokens=built_for.draft_tokens
        ),
    )
    build_engine(model, options, SilentProgress())
    return options


def prompts(model: SynthModel) -> list[Prompt]:
    return [Prompt(str(i), tuple(ids), None) for i, ids in enumerate(model.prompts()[:6])]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SynthModel, Engine]]:
    model = tiny(0.78, draft_kind="dflash")
    chain = DraftShape(1, LEVELS, LEVELS)
    folder = tmp_path_factory.mktemp("dflash")
    with on_gpu(engine_for(folder, model, "cuda", chain).output) as engine:
        yield model, engine


@pytest.mark.parametrize("depth", [None, 1, 4, LEVELS])
def test_tokens_and_accepted_drafts_are_those_of_the_rules(
    made: tuple[SynthModel, Engine], depth: int | None
) -> None:
    """Four sequences in company, whose steps accept any number of drafts."""
    model, engine = made
    target, draft = successors(model)
    shape = None if depth is None else DraftShape(1, depth, depth)
    for record in run(engine, prompts(model), shape):
        expected = expected_histogram(record, target, draft, depth or 0)
        assert list(record.stats.acceptance_histogram) == expected


@pytest.mark.parametrize("kind", ["dflash", "p-eagle"])
def test_trees_are_accepted_as_on_the_cpu(tmp_path: Path, kind: str) -> None:
    """Both make a tree of one pass: tokens, and steps by the drafts that they accepted."""
    model = tiny(0.5, draft_kind=kind)
    slow = Engine.load(engine_for(tmp_path, model, "cpu", TREE).output)
    expected = figures(run(slow, prompts(model), TREE))
    with on_gpu(engine_for(tmp_path, model, "cuda", TREE).output) as engine:
        for together in (1, BATCH):
            found: list[RunRecord] = []
            for first in range(0, 6, together):
                found += run(engine, prompts(model)[first : first + together], TREE)
            tokens, histogram = figures(found)
            assert tokens == expected[0]
            # What a tree holds hangs on scores that bf16 may order otherwise.
            drafted, steps = (sum(i * n for i, n in enumerate(h)) for h in (histogram, expected[1]))
            assert drafted == pytest.approx(steps, rel=0.03)


def figures(records: list[RunRecord]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Outputs by prompt, and all their steps by accepted drafts."""
    ordered = sorted(records, key=lambda record: record.prompt_ids)
    counts = [record.stats.acceptance_histogram for record in ordered]
    return (
        [tuple(record.output_ids) for record in ordered],
        [sum(column) for column in zip(*counts, strict=True)],
    )
