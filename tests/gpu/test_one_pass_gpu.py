"""One-pass drafts on a GPU: they draft by their rules and like the CPU, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from example_engine import on_gpu
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, run, successors, tiny

from specbuild.builder.families.dflash.synth import BLOCK
from specbuild.builder.families.p_eagle.synth import POSITIONS
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.synth import build_engine
from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import Phase
from specbuild.cli.bench.steps import StepSweep
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.measure.byte_floor import engine_traffic
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import Prompt
from specbuild.runtime.settings import RuntimeSettings

BATCH, LEVELS = 4, BLOCK - 1
DEEPEST = {"dflash": LEVELS, "jetspec": LEVELS, "p-eagle": POSITIONS - 1}
TREE = DraftShape(3, LEVELS, 12)
# Three pages of 64 tokens and a part.
PROMPT_TOKENS = 200


def model_of(kind: str, acceptance: float) -> SynthModel:
    """JetSpec is a causal DFlash: no row of a synthetic block reads later ones."""
    own = "dflash" if kind == "jetspec" else kind
    model = tiny(acceptance, draft_kind=own, prompt_tokens=PROMPT_TOKENS)
    if kind == "jetspec":
        assert isinstance(model.draft, DFlashGeometry)
        model.draft = replace(model.draft, causal=True)
    return model


def engine_for(folder: Path, model: SynthModel, backend: str, built_for: DraftShape) -> Path:
    options = BuildOptions(
        model=Path("tiny"),
        output=folder / f"{backend}-{built_for.draft_top_k}",
        backend=backend,  # type: ignore[arg-type]
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=BATCH),
        drafting=DraftOptions(
            top_k=built_for.draft_top_k, depth=built_for.draft_depth, tokens=built_for.draft_tokens
        ),
    )
    build_engine(model, options, SilentProgress())
    return options.output


def chain(depth: int) -> DraftShape:
    return DraftShape(1, depth, depth)


def prompts(model: SynthModel) -> list[Prompt]:
    return [Prompt(str(i), tuple(ids), None) for i, ids in enumerate(model.prompts()[:6])]


@pytest.fixture(scope="module", params=DEEPEST)
def synthetic(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SynthModel, Engine]]:
    model = model_of(request.param, 0.78)
    folder = tmp_path_factory.mktemp(request.param)
    deepest = chain(DEEPEST[request.param])
    with on_gpu(engine_for(folder, model, "cuda", deepest)) as engine:
        yield model, engine


@pytest.mark.parametrize("depth", [None, 1, 4, LEVELS])
def test_tokens_and_acceptance_follow_the_rules(
    synthetic: tuple[SynthModel, Engine], depth: int | None
) -> None:
    """Four sequences run together, and steps accept any number of draft tokens."""
    model, engine = synthetic
    target, draft = successors(model)
    shape = None if depth is None else chain(depth)
    for record in run(engine, prompts(model), shape):
        expected = expected_histogram(record, target, draft, depth or 0)
        assert list(record.stats.acceptance_histogram) == expected


def test_a_cached_prefix_does_not_change_the_acceptance(
    synthetic: tuple[SynthModel, Engine],
) -> None:
    """The draft's pages of a prompt are shared too: with stale pages nothing would be accepted."""
    model, engine = synthetic
    target, draft = successors(model)
    depth = engine.manifest.limits.draft_depth
    engine = Engine(engine.manifest, engine.executor, RuntimeSettings(prefix_caching="on"))
    cached = []
    for _ in range(2):
        for record in run(engine, prompts(model)[:BATCH], chain(depth)):
            expected = expected_histogram(record, target, draft, depth)
            assert list(record.stats.acceptance_histogram) == expected
            cached.append(record.stats.cached_tokens)
    page_size = engine.manifest.cache_groups[0].page_size
    whole = (PROMPT_TOKENS - 1) // page_size * page_size
    assert cached == [0] * BATCH + [whole] * BATCH
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


def test_a_sweep_measures_the_pass(synthetic: tuple[SynthModel, Engine]) -> None:
    """All levels of a chain are one phase, listed with the bytes that it reads."""
    _, engine = synthetic
    results: list[Phase] = []
    executor = cuda_executor(engine)
    traffic = engine_traffic(executor.plan, executor.runner.described)
    sweep = StepSweep(engine, traffic, None, ("draft",), repeats=4)
    sweep.run([1], [PROMPT_TOKENS], Budget.of(60.0, []), results.append)
    (phase,) = results
    assert phase.name == f"chain of {engine.manifest.limits.draft_depth}, pass"
    assert phase.time_s > 0 and phase.bytes.draft == phase.bytes_total > 0


@pytest.mark.parametrize("kind", DEEPEST)
def test_acceptance_of_trees_equals_the_cpu_engine(tmp_path: Path, kind: str) -> None:
    """Compare tokens, and steps by the number of accepted draft tokens."""
    model = model_of(kind, 0.5)
    slow = Engine.load(engine_for(tmp_path, model, "cpu", TREE))
    expected = figures(run(slow, prompts(model), TREE))
    with on_gpu(engine_for(tmp_path, model, "cuda", TREE)) as engine:
        for together in (1, BATCH):
            results: list[RunRecord] = []
            for first in range(0, 6, together):
                results += run(engine, prompts(model)[first : first + together], TREE)
            tokens, histogram = figures(results)
            assert tokens == expected[0]
            # The nodes of a tree depend on scores, whose order bf16 may change.
            drafted, steps = (sum(i * n for i, n in enumerate(h)) for h in (histogram, expected[1]))
            assert drafted == pytest.approx(steps, rel=0.03)


def figures(records: list[RunRecord]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return outputs by prompt, and all steps by accepted draft tokens."""
    ordered = sorted(records, key=lambda record: record.prompt_ids)
    counts = [record.stats.acceptance_histogram for record in ordered]
    return (
        [tuple(record.output_ids) for record in ordered],
        [sum(column) for column in zip(*counts, strict=True)],
    )
