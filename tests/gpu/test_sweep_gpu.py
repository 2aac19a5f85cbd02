"""``bench sweep`` on the example engine: every phase is measured, and no value is impossible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specbuild.cli.bench.report import SWEEPS, SweepReport
from specbuild.cli.bench.sweep import SweepSettings, run_sweep, stream_kernel
from specbuild.cli.terminal.console import json_line
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.benchmark_batch import benchmark_batch, cuda_executor
from specbuild.runtime.measure.read_speed import streaming_read
from specbuild.runtime.measure.routed_experts import experts_touched
from specbuild.runtime.measure.step_timing import measure_step

pytestmark = pytest.mark.speed


@pytest.fixture(scope="module")
def report(directory: Path) -> SweepReport:
    """All sweeps, shortened; the sweep loads the engine itself."""
    settings = SweepSettings(
        SWEEPS, batches=(1, 8), contexts=(100, 800), max_new_tokens=32, rounds=1, limit_s=40,
        repeats=8,
    )  # fmt: skip
    return run_sweep(directory, settings)


def test_every_phase_was_measured(report: SweepReport) -> None:
    result = {(p.sweep, p.batch, round(p.context, -2)) for p in report.phases}
    for batch in (1, 8):
        for sweep in ("decode", "verify", "draft"):
            for context in (100, 800):
                assert (sweep, batch, context) in result
    assert {p.name for p in report.phases if p.sweep == "prefill"} == {"512 tokens"}
    assert {row.batch for row in report.decoding} <= {1, 8}
    assert json.loads(json_line(report))["ceiling_bytes_per_s"] == report.ceiling_bytes_per_s


def test_rates_are_below_the_hardware_limits(report: SweepReport) -> None:
    assert report.ceiling_bytes_per_s is not None
    assert 1e12 < report.ceiling_bytes_per_s < 1e13
    for phase in report.phases:
        if phase.sweep in ("decode", "prefill"):
            assert 0 < phase.time_s < 1
            # All of the example's weights fit into the L2 cache.
            assert phase.share_of_ceiling is not None and 0 < phase.share_of_ceiling < 2
        if phase.idle_s is not None:
            assert abs(phase.idle_s) < 100e-6
        if phase.sweep == "decode":
            assert phase.experts_measured and phase.experts >= 1


def test_the_times_of_an_anatomy_add_up_to_the_step(report: SweepReport) -> None:
    """The times that launches add equal the time of the graph; run serially, they take no less.

    Other processes may use the GPU at the same time.
    """
    *steps, prompt = report.anatomies
    assert [step.draft for step in steps] == ["no draft", "chain of 4"]
    added_s = sum(launch.added_s or 0.0 for launch in prompt.launches)
    assert prompt.draft.endswith("tokens of a prompt")
    assert added_s == pytest.approx(prompt.step_s, rel=0.3)
    for step in steps:
        assert step.step_s is not None and step.serial_s is not None
        added_s = sum(launch.added_s or 0.0 for launch in step.launches)
        serial_s = sum(launch.serial_s or 0.0 for launch in step.launches)
        assert added_s == pytest.approx(step.step_s, rel=0.3)
        assert serial_s == pytest.approx(step.serial_s, rel=0.3)
        assert step.step_s < 1.3 * step.serial_s
        assert step.experts_measured and step.bytes_read > 0
    decode = next(p for p in report.phases if (p.sweep, p.batch) == ("decode", 1))
    plain = report.anatomies[0]
    assert plain.bytes_read == pytest.approx(decode.bytes_total, rel=0.02)
    assert plain.step_s == pytest.approx(decode.time_s, rel=0.5)


def test_drafts_change_no_token_and_loading_is_reported(report: SweepReport) -> None:
    assert report.decoding and all(row.same_tokens for row in report.decoding)
    assert report.load is not None
    assert all(0 < time_s < 120 for time_s in report.load.first_token_s)
    assert 0 < report.load.beyond_bytes < 2 << 30


def test_one_row_reads_only_its_selected_experts(engine: Engine) -> None:
    """A row alone reads exactly ``experts_per_token`` experts; eight rows read more."""
    moe = engine.manifest.target.moe
    assert moe is not None
    chosen = moe.experts_per_token
    table = ProgramTable(cuda_executor(engine).plan)
    by_key = {}
    for batch in (1, 8):
        with benchmark_batch(engine, batch=batch, context=60, shape=None) as placed:
            entry = table.step(None, batch=batch, full_logits=False)
            by_key[batch] = experts_touched(placed.executor, entry)
            step = measure_step(engine, placed, None, repeats=4)
        assert step.experts == by_key[batch]
        assert step.context == pytest.approx(60, abs=4)
        assert sum(section.added_s for section in step.sections) > 0.5 * step.step_s
    assert by_key[1] == chosen
    assert chosen < by_key[8] <= moe.experts


def test_measuring_does_not_change_the_engine(engine: Engine) -> None:
    executor = cuda_executor(engine)
    ids = np.random.default_rng(5).integers(0, engine.manifest.target.vocab, 40).tolist()
    before = [rows.logits for rows in engine.decoder.score(ids)]
    with benchmark_batch(engine, batch=2, context=30, shape=None) as placed:
        measure_step(engine, placed, None, repeats=3, idle=True)
    free_bytes = executor.runner.gpu.free_bytes()
    streaming_read(executor.runner.gpu, stream_kernel(executor.plan.gpu), nbytes=1 << 30)
    assert abs(executor.runner.gpu.free_bytes() - free_bytes) < 64 << 20
    after = [rows.logits for rows in engine.decoder.score(ids)]
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)
