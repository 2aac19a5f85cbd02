"""``bench sweep`` of specpv: the initial state of each timed step, and the composition of a mix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from left_out import slow

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from checkpoints import write_draft, write_target
from plan_host import lowered_engine
from test_cuda_views import engine_of

from specbuild.cli.bench import sweep as bench_sweep
from specbuild.cli.bench import views as sweep_views
from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import Phase
from specbuild.cli.bench.sweep import Progress, SweepSettings, measure
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.engine_dir.traffic import Term
from specbuild.runtime.measure import benchmark_batch
from specbuild.runtime.measure.byte_floor import EngineTraffic, PassTraffic

SPECPV = {
    "specpv": True,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 6,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 16,
    "specpv_partial_threshold": 40,
}


CHAIN = {"draft_top_k": 1, "draft_depth": 2, "draft_tokens": 2}
TREE = {"draft_top_k": 2, "draft_depth": 2, "draft_tokens": 4}


@pytest.fixture(scope="module", params=[CHAIN, *slow(TREE)], ids=["chain", "tree"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("sweep")
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(path / "t", layers=2, experts=4, experts_per_token=2, **sizes)
    write_draft(path / "d", target_layers=2, target_hidden=96, inner=64, **sizes)
    options = {"max_seq_len": 400, "max_batch_size": 2, "page_size": 16, **request.param, **SPECPV}
    return engine_of(lowered_engine(path / "t", path / "d", **options))[0]


def test_rows_start_from_their_stated_states(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[dict[str, np.ndarray]] = []
    entries: list[ProgramEntry] = []
    astray: list[int] = []
    executor = engine.executor

    def timed(_runner: Any, entry: ProgramEntry, _n: int, *, reset: Callable[[], None]) -> float:
        reset()
        entries.append(entry)
        views = executor.read("view_blocks", rows=2), executor.read("budget", rows=2)
        if entry.reverified == 0 and (views[0] >= 0).all():
            astray.append(_astray(executor, *views))
        executor.runner.start(entry)
        executor.synchronize()
        reset()
        names = ("full_step", "view_blocks", "budget", "verified_len", "length", "buffered_tokens")
        states.append({name: executor.read(name, rows=2) for name in names})
        return 1e-3 if entry.reverified == 0 else 3e-3

    monkeypatch.setattr(sweep_views, "time_program", timed)

    def touched(_executor: Any, entry: ProgramEntry) -> float | None:
        return 3.99 if entry.reverified > 0 else None

    monkeypatch.setattr(sweep_views, "experts_touched", touched)
    monkeypatch.setattr(sweep_views, "profile_program", lambda *_, **__: [])
    rows: list[Phase] = []
    budget = Budget.of(600.0, [])
    target = PassTraffic(
        (Term("dense", 1000, "pass"), Term("experts", 10, "chosen_expert")),
        experts=4,
        experts_per_token=2,
    )
    sweep = sweep_views.ViewSweep(
        engine, EngineTraffic(target), 1e9, 2, retrieved=(8, 50, 16, 48, 8192)
    )
    monkeypatch.setattr(sweep_views, "cuda_executor", lambda e: e.executor)
    monkeypatch.setattr(benchmark_batch, "cuda_executor", lambda e: e.executor)
    sweep.run([2], [200, 30, 9000], budget, rows.append)
    sweep.run([], [60], budget, rows.append)
    names = [row.name for row in rows]
    assert names[:3] == ["whole", "full, with its choice", "partial, 16 tokens retrieved"]
    assert names[3:5] == ["refresh of one, 16 tokens retrieved", "mix, 16 tokens retrieved"]
    has_tree = engine.manifest.limits.draft_top_k > 1
    assert len(rows) == (16 if has_tree else 8) and len(budget.left_out) == 8
    refused = {200: ((8, 8192), 96), 60: ((8, 50, 48, 8192), 16)}
    assert [*budget.left_out[:2], *budget.left_out[4:]] == [
        f"specpv, context {context}, {n} tokens retrieved: views retrieve 16 to {most}"
        for context, (tokens, most) in refused.items()
        for n in tokens
    ]
    whole, full, partial, refresh = states[:4]
    assert (whole["view_blocks"] == -1).all() and not whole["full_step"].any()
    assert full["full_step"].all() and (full["verified_len"] == full["length"]).all()
    blocks = [max(0, (n - 16) // 16 - 1) for n in partial["length"]]
    assert partial["view_blocks"].tolist() == blocks and (partial["budget"] == 1).all()
    assert refresh["full_step"].tolist() == [1, 0]
    assert (refresh["length"] - refresh["verified_len"]).tolist() == [12, 0]
    # Partial steps read views with the stated number of blocks.
    assert astray == [0] * (len(rows) // 4)
    # Re-verified tokens are the ends of the prompts and the emitted tokens.
    prompts = np.random.default_rng(0).integers(0, engine.manifest.target.vocab, (2, 200))
    fed = np.arange(int(refresh["verified_len"][0]), 200)
    assert len(fed) > 6
    np.testing.assert_array_equal(refresh["buffered_tokens"][0, fed % 16], prompts[0, fed])
    mix = rows[4]
    # With 1 + 0.7 + 0.49 tokens a step, 12 tokens and two sequences, one step in 2.74 is a refresh.
    assert mix.time_s == pytest.approx((1.7397 * 1e-3 + 3e-3) / 2.7397, rel=1e-3)
    assert mix.tokens_per_s == pytest.approx(2 * 2.19 / mix.time_s)
    assert rows[0].context > 199
    # Two sequences of three rows each select 2 of 4 experts at random if none are read back.
    assert rows[2].experts == pytest.approx(4 * (1 - 0.5**6)) and not rows[2].experts_measured
    assert rows[3].experts == 3.99 and rows[3].experts_measured
    assert rows[2].experts < mix.experts < rows[3].experts
    assert mix.bytes_total == pytest.approx(1000 + 10 * mix.experts)
    chain = len(entries) // (2 if has_tree else 1)
    assert {(e.draft_top_k, e.draft_tokens) for e in entries[:chain]} == {(1, 2)}
    if has_tree:
        assert {(e.draft_top_k, e.draft_tokens) for e in entries[chain:]} == {(2, 4)}
        trees, tree = rows[8:], "tree of 4 (2 wide, 2 deep)"
        assert [row.name for row in trees] == [f"{name}, {tree}" for name in names[:8]]
        assert trees[0].experts == pytest.approx(4 * (1 - 0.5**10))
        assert trees[4].tokens_per_s == pytest.approx(2 * 2.19 / trees[4].time_s)


def test_the_plan_determines_the_measured_views(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrieved_of_runs: list[Sequence[int]] = []
    monkeypatch.setattr(
        sweep_views.ViewSweep, "run", lambda self, *_: retrieved_of_runs.append(self.retrieved)
    )
    monkeypatch.setattr(bench_sweep, "engine_traffic", lambda *_: EngineTraffic(PassTraffic()))
    monkeypatch.setattr(bench_sweep, "cuda_executor", lambda e: e.executor)
    monkeypatch.setattr(type(engine.executor.runner), "described", None, raising=False)
    for settings in (SweepSettings(("specpv",), retrieved=(16, 48)), SweepSettings(("specpv",))):
        measure(engine, settings, None, [], Progress([].append))
    assert retrieved_of_runs == [(16, 48), sweep_views.RETRIEVED_TOKENS]


def _astray(executor: Any, blocks: np.ndarray, budget: np.ndarray) -> int:
    """Return view tables in which the page of the sequence's next token is elsewhere."""
    lengths, whole = (executor.read(name, rows=2) for name in ("length", "page_table.full"))
    hidden = (blocks - np.minimum(budget, blocks)) * 16
    names = [p.name for p in executor.plan.ports if p.name.startswith("partial_table.")]
    assert names
    return sum(
        int((executor.read(name, rows=2)[b][:, at // 16] != whole[b, lengths[b] // 16]).sum())
        for name in names
        for b, at in enumerate(lengths - hidden)
    )


def test_omits_an_engine_without_views(monkeypatch: pytest.MonkeyPatch) -> None:
    from toy_device import toy_cuda

    monkeypatch.setattr(bench_sweep, "engine_traffic", lambda *_: EngineTraffic(PassTraffic()))
    monkeypatch.setattr(bench_sweep, "cuda_executor", lambda e: e.executor)
    progress = Progress([].append)
    toy = toy_cuda()
    monkeypatch.setattr(type(toy.engine.executor.runner), "described", None, raising=False)
    measure(toy.engine, SweepSettings(("specpv",)), None, [], progress)
    assert "specpv: the engine was built without --specpv" in progress.left_out
