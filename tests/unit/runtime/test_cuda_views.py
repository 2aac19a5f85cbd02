"""Partial views on a device: real plans with SpecPV, with the interpreter as kernels."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from fake_gpu import FakeGpu
from plan_host import PlanHost, lowered_engine
from test_cuda_interpreted import InterpretedRunner
from toy_engine import Run, run
from toy_model import toy_manifest

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.plan_reader import read_programs
from specbuild.builder.backends.cuda.plan.plan_writer import program_bytes
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

SHAPES = [None, DraftShape(1, 2, 2), DraftShape(2, 2, 4)]
SPECPV = {
    "specpv": True,
    "specpv_block_size": 16,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 6,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 14,
    "specpv_partial_threshold": 34,
    "specpv_full_refresh_interval": 5,
}
NEAR = 0.05
_CAPACITY = re.compile(r"\.refresh-(\d+)")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views")
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(path / "target", layers=4, experts=4, experts_per_token=2, **sizes)
    write_draft(path / "draft", target_layers=4, target_hidden=96, inner=64, **sizes)
    return path


def lowered(path: Path, **options: Any) -> LoweredEngine:
    limits = {"draft_top_k": 2, "draft_depth": 2, "draft_tokens": 4}
    sizes = {"max_seq_len": 160, "max_batch_size": 3, "page_size": 16, **limits}
    return lowered_engine(path / "target", path / "draft", **sizes, **options)


@pytest.fixture(scope="module")
def with_views(checkpoints: Path) -> LoweredEngine:
    return lowered(checkpoints, **SPECPV)


def engine_of(engine: LoweredEngine) -> tuple[Engine, InterpretedRunner, CudaExecutor]:
    host, gpu = PlanHost(engine), FakeGpu()
    executor = CudaExecutor(gpu, host.plan, lambda _: b"", lambda _: None)
    runner = InterpretedRunner(host, gpu, executor)
    executor.runner = runner
    toy = toy_manifest()
    manifest = dataclasses.replace(
        toy,
        backend="cuda",
        limits=engine.engine_sizes.limits,
        cache_groups=engine.engine_sizes.groups,
        target=dataclasses.replace(toy.target, vocab=host.port("score.logits").shape[1]),
        roles={},
        specpv=engine.engine_sizes.specpv,
    )
    return Engine(manifest, executor), runner, executor


def decode(
    engine: Engine,
    shape: DraftShape | None,
    tokens: int,
    blocks: int | None,
    lengths: tuple[int, ...] = (100, 21, 70, 40),
) -> Run:
    random = np.random.default_rng(8)
    batch = [random.integers(0, 200, n).tolist() for n in lengths]
    asked = GenerateParams(max_new_tokens=tokens, ignore_eos=True, specpv_retrieval_blocks=blocks)
    return run(engine, batch, asked, speculation=shape)


def alike(one: Run, other: Run) -> int:
    """Return the requests with equal tokens. The others differ after a near tie (see ``near``)."""
    return sum(a == b for a, b in zip(one.ids, other.ids, strict=True))


@pytest.mark.parametrize(
    "shape",
    [*(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:2]), SHAPES[2]],
    ids=["none", "chain", "tree"],
)
def test_a_view_of_everything_changes_nothing(
    with_views: LoweredEngine, shape: DraftShape | None
) -> None:
    """Partial steps, re-verified tokens, and sequences that join and leave give the same text."""
    engine, runner, _ = engine_of(with_views)
    wanted = decode(engine, shape, 18, 0)
    assert not [name for name in runner.started if ".refresh" in name]
    runner.started.clear()
    found = decode(engine, shape, 18, None)
    stats = [s for record in found.records if (s := record.stats.specpv) is not None]
    assert len(stats) == len(found.records)
    assert sum(s.partial_steps for s in stats) > 12
    assert not any(s.invariant_failures for s in stats)
    refreshes = [name for name in runner.started if ".refresh" in name]
    assert refreshes and len(refreshes) < len(runner.started) / 2
    for a, b, x, y in zip(wanted.ids, found.ids, wanted.records, found.records, strict=True):
        parted = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), len(a))
        # The references round differently with the number of rows: up to there they are close.
        assert parted >= 6
        assert x.logprobs is not None and y.logprobs is not None
        np.testing.assert_allclose(x.logprobs[:parted], y.logprobs[:parted], atol=NEAR)


def test_without_partial_steps_it_is_an_engine_without_views(
    checkpoints: Path, with_views: LoweredEngine
) -> None:
    plain, *_ = engine_of(lowered(checkpoints))
    engine, *_ = engine_of(with_views)
    wanted, found = decode(plain, SHAPES[1], 12, None), decode(engine, SHAPES[1], 12, 0)
    assert found.ids == wanted.ids
    stats = [record.stats.specpv for record in found.records]
    assert all(s is not None and s.partial_steps == 0 for s in stats)


def test_a_small_view_is_lossy_and_its_state_adds_up(with_views: LoweredEngine) -> None:
    engine, *_ = engine_of(with_views)
    whole, part = decode(engine, SHAPES[1], 24, 0), decode(engine, SHAPES[1], 24, 1)
    assert alike(whole, part) < 4
    for record in part.records:
        stats = record.stats.specpv
        assert stats is not None
        assert stats.retrieval_blocks == 1
        assert stats.partial_steps + stats.full_steps == record.stats.steps
        assert stats.partial_steps > stats.full_steps or len(record.prompt_ids) < 40
        assert (stats.rechecked_tokens > 0) == (stats.partial_steps > 4)
        assert stats.agreed_tokens <= stats.rechecked_tokens < len(record.output_ids)
        assert len(stats.agreement_per_interval) <= stats.full_steps


def test_programs_of_the_largest_batch_have_capacity_for_one_buffer_or_for_all(
    with_views: LoweredEngine,
) -> None:
    """In addition to the rows of the largest tree; they share their kernels."""
    steps = [entry for entry, _ in with_views.programs if entry.kind == "step"]
    assert len({program.ir.name for _, program in with_views.programs}) == len(with_views.programs)
    for entry in steps:
        assert entry.rows == entry.batch * (entry.draft_tokens + 1) + entry.reverified <= 256
        assert entry.batch == 4 or not entry.reverified
    buffer = SPECPV["specpv_n_spec_tokens_buf"]
    rows = [entry.rows for entry in steps if entry.reverified]
    assert set(rows) == {4 * 5 + buffer, 4 * 5 + 4 * buffer}


def test_a_refresh_has_the_capacity_that_it_needs(with_views: LoweredEngine) -> None:
    engine, runner, executor = engine_of(with_views)
    buffer, table = SPECPV["specpv_n_spec_tokens_buf"], ProgramTable(executor.plan)
    for batch in table.step_batches():
        assert table.refresh_capacity(None, batch=batch) == 4 * 4 + 4 * buffer
        for rows in (0, 1, buffer, 4 * buffer):
            step = table.step(None, batch=batch, full_logits=False, reverified=rows)
            assert step.reverified == 4 * 4 + (1 if rows <= buffer else 4) * buffer
        assert not table.step(None, batch=batch, full_logits=False).reverified
    assert {p.ir.phase for e, p in with_views.programs if e.reverified} == {"refresh"}
    for lengths in ((100, 21, 70, 40), (64, 64, 64)):
        decode(engine, SHAPES[1], 24, None, lengths)
    capacities = {int(found[1]) for name in runner.started if (found := _CAPACITY.search(name))}
    # Of two rows a tree, two short buffers fit where one full one does.
    assert 4 * 2 + buffer in capacities <= {4 * 2 + buffer, 4 * 2 + 4 * buffer}


def test_only_a_refresh_chooses_views(with_views: LoweredEngine) -> None:
    """Most steps do not have these launches. Two of four layers have full attention."""
    for entry, program in with_views.programs:
        ops = [call.op.name for call in program.ir.calls]
        chosen = 2 if entry.reverified else 0
        assert [ops.count(name) for name in ("KvBlockSummary", "KvBlockSelect")] == [chosen] * 2
        assert ops.count("ViewInputs") == int(entry.kind == "step")


def test_a_refresh_chooses_at_a_few_more_rows(with_views: LoweredEngine) -> None:
    """They fill up the head's last 8 rows and 8 more. No other step has any."""
    for entry, program in with_views.programs:
        counts = {c.op.name: c.inputs["choice"].shape[0] for c in program.ir.calls
                  if c.op.name in {"ViewTally", "Advance"}}  # fmt: skip
        assert ("ViewTally" in counts) == (entry.reverified > 0)
        if entry.reverified:
            assert counts["Advance"] == entry.batch * (entry.draft_tokens + 1)
            assert counts["ViewTally"] % 8 == 0
            assert 8 <= counts["ViewTally"] - counts["Advance"] < 16


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_agreement_is_measured_against_the_full_context(
    with_views: LoweredEngine, temperature: float
) -> None:
    """Chains of the samples: every token of a partial step is compared by scores."""
    engine, runner, _ = engine_of(with_views)
    prompt = np.random.default_rng(5).integers(0, 200, 90).tolist()
    sampling = SamplingParams(temperature=temperature, seed=11)
    asked = GenerateParams(
        max_new_tokens=26, ignore_eos=True, specpv_retrieval_blocks=1, sampling=sampling
    )
    record = run(engine, [prompt], asked, speculation=None).records[0]
    ids = [*prompt, *record.output_ids]
    host = PlanHost(with_views)
    host.give_pages(0)
    scores = [host.score(0, ids[at : at + 64], at) for at in range(0, len(ids), 64)]
    logits = torch.cat(scores).float()
    rows = len(logits)
    position = torch.arange(rows, dtype=torch.int32)
    whole, _ = op_named("Choose").reference(
        logits,
        torch.full((rows,), temperature),
        torch.zeros(rows, dtype=torch.int32),
        torch.ones(rows),
        torch.full((rows,), 11, dtype=torch.int32),
        position,
    )
    # The prompt's end gave the first token, each step one more.
    steps = [name for name in runner.started if name.startswith("step")][: len(ids) - 91]
    refreshes = [i for i, name in enumerate(steps) if ".refresh" in name]
    partial = [i for i in range(refreshes[-1]) if i not in refreshes]
    agreed = sum(int(whole[90 + i]) == ids[91 + i] for i in partial)
    stats = record.stats.specpv
    assert stats is not None
    assert stats.rechecked_tokens == len(partial) > 12
    assert stats.agreed_tokens == agreed < len(partial)
    assert len(stats.agreement_per_interval) == len(refreshes) - 1


def test_programs_are_read_back_with_their_phases(with_views: LoweredEngine) -> None:
    """Tuning lowers them again: a program that re-verifies tokens has other kernels."""
    files = {e.file: program_bytes(with_views.writer.program(p)) for e, p in with_views.programs}
    found = read_programs(PlanHost(with_views).plan, files.__getitem__)
    assert [ir.phase for _, ir in found.programs] == [p.ir.phase for _, p in with_views.programs]
    assert {ir.phase for _, ir in found.programs} == {"prefill", "decode", "refresh"}
