"""Step costs in an engine directory: measured, stored, used, and shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_gpu import HOPPER
from rich.console import Console
from test_cuda_engine_directory import load, write_cuda_engine
from toy_model import decode_plainly
from toy_plan import BATCHES, SHAPES

from specbuild.builder.engine.rewrite import rewrite_engine
from specbuild.builder.progress import SilentProgress
from specbuild.cli.commands.tune_costs import tune_costs
from specbuild.cli.main import main
from specbuild.cli.tables.step_cost_table import facts_of, step_cost_table
from specbuild.cli.terminal import engine_loading
from specbuild.runtime.draft.device_costs import (
    METHOD,
    ShapeCosts,
    StepCosts,
    programs_digest,
    read_step_costs,
    to_bytes,
)
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.traffic import Term
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.executors.cuda import loading
from specbuild.runtime.measure.byte_floor import EngineTraffic, PassTraffic
from specbuild.runtime.request import GenerateParams, Prompt, TokenEvent


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_cuda_engine(tmp_path / "engine")
    return tmp_path / "engine"


def costs_for(path: Path, gpu: str = HOPPER.name, draft_s: float = 1e-3) -> StepCosts:
    """Return costs with 10 ms for steps without a draft."""
    entries = [
        ShapeCosts(batch, *sizes, (64,), (step_s,), (0.0,))
        for batch in BATCHES
        for sizes, step_s in (((0, 0, 0), 1e-2), ((1, 1, 1), draft_s))
    ]
    return StepCosts(gpu, programs_digest(read_manifest(path)), METHOD, tuple(entries))


def loaded_from(path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return the result of ``Engine.load`` with the toy's GPU."""
    first, _ = load(path)
    monkeypatch.setattr(loading, "open_executor", lambda *_, **__: first.executor)
    return Engine.load(path)


def test_tune_stores_a_table_that_the_engine_vouches_for(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loading, "load_engine", lambda path: load(path)[0])
    facts = tune_costs(engine, SilentProgress())
    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    costs = read_step_costs(engine, manifest)
    assert costs is not None
    assert costs.shapes() == (SHAPES[0],)
    assert facts.current
    assert facts.gpu == HOPPER.name
    assert len(facts.rows) == sum(len(c.contexts) for c in costs.steps)
    rewrite_engine(engine, {"plan.json": (engine / "plan.json").read_bytes() + b" "})
    monkeypatch.undo()
    reason = loaded_from(engine, monkeypatch).default_draft.reason
    assert "programs changed" in reason


def test_the_default_draft_follows_from_the_stored_table(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite_engine(engine, {"step_costs.json": to_bytes(costs_for(engine))})
    loaded = loaded_from(engine, monkeypatch)
    params = GenerateParams(max_new_tokens=8, ignore_eos=True)
    events = loaded.generate([Prompt("p", prompt_ids=(1, 2))], params)
    tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
    expected = decode_plainly([1, 2], 8, params.sampling)
    assert tokens[: len(expected)] == expected
    assert loaded.default_draft.reason.startswith("chain of 1")
    assert "measured on Fake H200" in loaded.default_draft.reason


def test_reports_and_ignores_a_table_of_another_gpu(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite_engine(engine, {"step_costs.json": to_bytes(costs_for(engine, "Fake H100"))})
    reason = loaded_from(engine, monkeypatch).default_draft.reason
    assert "step times measured while decoding" in reason
    assert "measured on Fake H100, this is Fake H200" in reason


def test_reports_a_damaged_table(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite_engine(engine, {"step_costs.json": b"{}"})
    assert (
        "step_costs.json: key 'gpu' is missing"
        in loaded_from(engine, monkeypatch).default_draft.reason
    )
    data = to_bytes(costs_for(engine))
    rewrite_engine(engine, {"step_costs.json": data})
    (engine / "step_costs.json").write_bytes(data.replace(b"H200", b"H100"))
    with pytest.raises(EngineFileError, match="damaged"):
        loaded_from(engine, monkeypatch)


def test_inspect_shows_times_and_bytes() -> None:
    target = PassTraffic(
        (Term("dense", 3_000_000_000, "pass"), Term("head", 1_000_000_000, "pass"))
    )
    draft = PassTraffic((Term("dense", 500_000_000, "pass"),))
    chain = ShapeCosts(4, 1, 2, 2, (64, 1024), (2e-3, 4e-3), (1e-3, 1e-3))
    costs = StepCosts("Fake H200", "digest", METHOD, (chain,))
    facts = facts_of(costs, EngineTraffic(target, draft), "digest")
    assert [row.floor_bytes for row in facts.rows] == [5e9, 5e9]
    assert [row.floor_bytes_per_s for row in facts.rows] == pytest.approx([2.5e12, 1.25e12])
    assert [row.target_s for row in facts.rows] == pytest.approx([1e-3, 3e-3])
    console = Console(width=100)
    with console.capture() as shown:
        console.print(step_cost_table(facts))
        console.print(step_cost_table(dataclasses.replace(facts, current=False)))
    text = shown.get()
    assert "1x2x2" in text
    assert "2.000" in text
    assert "5.00" in text
    assert "2.50" in text
    assert text.count("outdated") == 1
    assert DraftShape(1, 2, 2) == chain.shape


def test_rejects_a_tune_that_skips_everything(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(engine), "--skip-tactics", "--skip-costs"]) == 2
    assert "nothing to measure" in capsys.readouterr().err
