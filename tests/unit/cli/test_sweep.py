"""``bench sweep`` on a toy engine whose clock counts operations, and rejected options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from fake_gpu import FakeGpu, FakeKernel
from toy_device import ToyCuda, toy_cuda

from specbuild.cli.bench import runs as sweep_runs
from specbuild.cli.bench import sweep as bench_sweep
from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import SWEEPS, Load, SweepReport
from specbuild.cli.bench.roofline import plot_sweep
from specbuild.cli.bench.steps import middle_layer
from specbuild.cli.bench.sweep import Progress, SweepSettings, measure, run_sweep, sweeps_of
from specbuild.cli.bench.table import sweep_tables
from specbuild.cli.terminal.console import json_line, plain_console
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.prompt_launches import prompt_launches
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import (
    ACCEPT,
    SELECT,
    TARGET,
    Binding,
    OpCall,
    Program,
    ProgramEntry,
    RouterLogits,
    level_section,
)
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.engine_dir.traffic import Part, Term, Traffic
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.program_file import read_launches
from specbuild.runtime.executors.cuda.programs import ProgramRunner
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.measure.read_speed import ReadKernel, streaming_read
from specbuild.runtime.measure.routed_experts import experts_touched
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, TokenEvent

RANDOM = np.random.default_rng(11)
CEILING = 1000.0


def described(runner: ProgramRunner, entry: ProgramEntry) -> Program:
    """Describe the toy's only launch as the ops of a real step, which read one weight."""
    plan = runner._plan
    launches = read_launches(runner._read_file(entry.file), plan, entry)

    def reading(section: str, part: Part = "dense") -> OpCall:
        traffic = Traffic(
            read=(Term(part, WEIGHT, "pass"),),
            operations=(Term(part, 2 * 32 * 32, "logit_row" if part == "head" else "row"),),
        )
        return OpCall("head" if part == "head" else "op", {}, {}, {}, section, traffic)

    ops = []
    for level in range(1, entry.draft_depth + 1):
        ops.append(reading(level_section(level)))
    if entry.draft_depth:
        ops.append(OpCall("op", {}, {}, {}, SELECT))
    if entry.extends:
        ops.append(reading(level_section(1)))
    ops += [*(reading(TARGET) for _ in range(2)), reading(TARGET, "head")]
    ops.append(OpCall("op", {}, {}, {}, ACCEPT))
    # The launch belongs to the target, in the first of its two layers.
    return Program(tuple(ops), tuple(replace(launch, op=len(ops) - 4) for launch in launches), ())


SHAPES = (DraftShape(1, 1, 1), DraftShape(1, 2, 2), DraftShape(2, 2, 3))
PROMPTS = [Prompt("a", prompt_ids=(1, 2, 3)), Prompt("b", prompt_ids=(4,))]
WEIGHT = 2 * 16 * 4


def settings_of(*sweeps: str) -> SweepSettings:
    return SweepSettings(
        sweeps, batches=(2,), contexts=(5, 400), max_new_tokens=6, rounds=1, repeats=1
    )


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyCuda]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramRunner, "described", described)
        patch.setattr(ProgramRunner, "launches", lambda r, entry: described(r, entry).launches)
        yield toy_cuda(shapes=SHAPES)


def new_progress() -> Progress:
    return Progress([].append)


@pytest.fixture(scope="module")
def measured(toy: ToyCuda) -> Progress:
    progress = new_progress()
    settings = settings_of("decode", "verify", "draft", "profile", "prefill", "spec")
    measure(toy.engine, settings, CEILING, PROMPTS, progress)
    return progress


def test_steps_are_listed_with_their_floors(toy: ToyCuda, measured: Progress) -> None:
    rows = {(p.sweep, p.name): p for p in measured.phases}
    row = rows["decode", "no draft"]
    # One kernel, and the event after it, for two sequences.
    assert (row.time_s, row.tokens_per_s) == (2, 1)
    assert (row.bytes_total, row.bytes.head) == (3 * WEIGHT, WEIGHT)
    assert row.share_of_ceiling == pytest.approx(3 * WEIGHT / 2 / CEILING)
    assert row.operations == 2 * 3 * 2 * 32 * 32
    assert row.context == pytest.approx(5, abs=4)
    # The fake's graphs follow each other without gaps except the events.
    assert row.idle_s == 0
    chain = rows["verify", "chain of 2"]
    assert (chain.rows, chain.time_s, chain.bytes_total) == (6, 1, 3 * WEIGHT)
    whole = rows["verify", "chain of 2, whole step"]
    assert (whole.time_s, whole.bytes_total) == (2, 5 * WEIGHT)
    assert ("verify", "tree of 3 (2 wide, 2 deep)") in rows
    levels = [rows["draft", f"chain of 2, level {n}"] for n in (1, 2)]
    assert [level.bytes.draft for level in levels] == [WEIGHT] * 2
    # The toy's only kernel belongs to the target, so there is no time to divide by.
    assert levels[1].time_s == 0 and levels[1].bytes_per_s is None
    assert not toy.ledger.held


def test_trees_are_verified_at_every_context(toy: ToyCuda) -> None:
    """Contexts are measured while time is left; the profile covers the first context only."""
    settings = replace(settings_of("verify", "profile"), contexts=(5, 16, 400))
    progress = new_progress()
    measure(toy.engine, settings, None, PROMPTS, progress)
    names = {context: [p.name for p in progress.phases if abs(p.context - context) < 4]
             for context in (5, 16)}  # fmt: skip
    assert names[5] == names[16] and len(names[5]) == 2 * len(SHAPES)
    assert len(progress.kernels) == 2
    assert any("context 400" in reason for reason in progress.left_out)
    hurried = new_progress()
    measure(toy.engine, replace(settings, limit_s=0.0), None, PROMPTS, hurried)
    assert not hurried.phases and "batch 2, context 16: the time limit" in hurried.left_out
    alone = new_progress()
    measure(toy.engine, replace(settings, sweeps=("profile",)), None, PROMPTS, alone)
    assert not alone.phases and len(alone.kernels) == 2


def test_a_profile_has_a_row_for_each_kernel(measured: Progress) -> None:
    plain, drafted = measured.kernels
    assert (plain.step, drafted.step) == ("no draft", "chain of 2")
    for row in measured.kernels:
        assert (row.batch, row.launches, row.added_s) == (2, 1, 2)
        assert row.kernel.startswith("toy/kernel.cu:step@2.")
    assert [(row.step, row.layer, row.op) for row in measured.timeline] == [
        ("no draft", 0, "op"),
        ("chain of 2", 0, "op"),
    ]
    assert [row.added_s for row in measured.timeline] == [2, 2]


def test_an_anatomy_times_every_launch_of_the_first_batch_and_context(
    toy: ToyCuda, tmp_path: Path
) -> None:
    progress = new_progress()
    settings = replace(settings_of("anatomy"), batches=(2, 1), contexts=(5, 16))
    measure(toy.engine, settings, CEILING, PROMPTS, progress)
    plain, drafted = progress.anatomies
    assert (plain.draft, drafted.draft) == ("no draft", "chain of 2")
    for step in progress.anatomies:
        assert step.batch == 2 and step.context == pytest.approx(5, abs=4)
        # One kernel and the event after it.
        assert step.step_s == step.serial_s == 2
        [launch] = step.launches
        assert (launch.section, launch.op, launch.added_s, launch.serial_s) == (TARGET, "op", 2, 2)
        # The toy's only launch is the first op of the target.
        assert launch.bytes_read == WEIGHT
    assert not progress.phases and not toy.ledger.held
    report = SweepReport("Fake", "toy", CEILING, (), (), (), None, (), anatomies=(plain, drafted))
    assert from_json(SweepReport, json.loads(json_line(report)), "it") == report
    with (tmp_path / "table.txt").open("w") as file:
        plain_console(file).print(sweep_tables(report))
    assert "its launches add up to 2000000.0 µs: 100.0 %" in (tmp_path / "table.txt").read_text()


def test_an_anatomy_of_one_sequence_has_its_prompt_too(toy: ToyCuda) -> None:
    """Its rows are those of the last launch that read the prompt."""
    progress = new_progress()
    settings = replace(settings_of("anatomy"), batches=(1,), contexts=(5,))
    measure(toy.engine, settings, CEILING, PROMPTS, progress)
    *steps, prompt = progress.anatomies
    assert [step.draft for step in steps] == ["no draft", "chain of 2"]
    assert prompt.program.startswith("prefill") and prompt.batch == 1
    table = ProgramTable(cuda_executor(toy.engine).plan)
    *before, rows = prompt_launches(5, table.prefill_rows)
    assert (prompt.draft, prompt.context) == (f"{rows} tokens of a prompt", sum(before))
    assert prompt.step_s == 2 and prompt.serial_s is None
    assert all(launch.added_s == 2 and launch.serial_s is None for launch in prompt.launches)


def test_omits_sizes_that_the_engine_does_not_support(measured: Progress) -> None:
    assert not [p for p in measured.phases if p.sweep == "prefill"]
    assert sum("prefill" in reason for reason in measured.left_out) == 3
    assert any("context 400" in reason for reason in measured.left_out)


def test_decoding_has_a_row_for_every_draft(measured: Progress) -> None:
    drafts = [row.draft for row in measured.decoding]
    assert drafts[:2] == ["no draft", "chain of 1"] and drafts[-1].startswith("default: ")
    for row in measured.decoding:
        assert row.same_tokens and row.tokens_per_s > 0
        assert 1 <= row.mean_acceptance_length <= 3
    assert measured.decoding[0].ratio == 1


def test_measures_the_time_to_first_token(toy: ToyCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = new_progress()
    monkeypatch.setattr(bench_sweep, "PROMPT_TOKENS", (5, 20))
    measure(toy.engine, settings_of("prefill"), None, PROMPTS, progress)
    short, long = progress.phases
    assert (short.rows, long.rows) == (5, 20)
    assert short.share_of_ceiling is None and short.time_s > 0
    # Chunks of 8 rows; each reads the target's three weights and the draft's one.
    assert short.bytes_total == 4 * WEIGHT
    assert long.bytes_total == 3 * 4 * WEIGHT
    assert long.operations > 3.9 * short.operations


def test_a_time_budget_omits_phases() -> None:
    left_out: list[str] = []
    budget = Budget.of(60, left_out)
    assert budget.allows("short")
    budget.took_up(100, 10.0)
    assert budget.allows("short", prompt_tokens=500)
    assert not budget.allows("long", prompt_tokens=700)
    assert left_out == ["long: the time limit"]


def test_the_report_is_printed_and_drawn(measured: Progress, tmp_path: Path) -> None:
    load = Load(1.5, (2.25, 2.0), 1 << 30, 1 << 20, 3 << 20, 400 << 20)
    prompt = replace(measured.phases[0], sweep="prefill", name="512 tokens")
    report = SweepReport(
        gpu="Fake, CUDA 13.0",
        engine="toy",
        ceiling_bytes_per_s=CEILING,
        phases=(*measured.phases, prompt, replace(prompt, sweep="specpv")),
        kernels=tuple(measured.kernels),
        decoding=tuple(measured.decoding),
        load=load,
        left_out=("something: no time",),
    )
    read = json.loads(json_line(report))
    assert read["phases"][0]["bytes"]["head"] == WEIGHT
    assert read["load"]["first_token_s"] == [2.25, 2.0]
    with (tmp_path / "table.txt").open("w") as file:
        console = plain_console(file)
        console.width = 200
        console.print(sweep_tables(report))
    text = (tmp_path / "table.txt").read_text()
    for part in ("decode: no draft", "chain of 2", "2.25 s, 2.00 s", "skipped: something"):
        assert part in text
    for name in ("one.svg", "two.svg"):
        plot_sweep(report, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "two.svg").read_bytes()
    assert b"<svg" in drawn


def test_rejects_unknown_sweeps(
    make_manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweeps_of("spec, decode") == ("decode", "spec")
    assert sweeps_of(",".join(SWEEPS)) == SWEEPS
    for text, value in (("decode,fast", "fast"), (",", "nothing")):
        with pytest.raises(
            SpecbuildError, match=f"got {value}, expected some of decode,verify,draft,profile"
        ):
            sweeps_of(text)
    monkeypatch.setattr(bench_sweep, "read_manifest", lambda _: make_manifest())
    with pytest.raises(UnsupportedHereError, match=r"was built for cpu; use bench pairs"):
        run_sweep(tmp_path, settings_of("decode"))


def test_reports_the_failure_of_a_subprocess(tmp_path: Path) -> None:
    from specbuild.cli.bench.runs import time_fresh_process

    with pytest.raises(SpecbuildError, match=r"gave no token within 300 s: .*does not exist"):
        time_fresh_process(tmp_path / "none", 100)


def test_measures_the_speed_of_a_streaming_read() -> None:
    calls = []
    kernel = FakeKernel(lambda *values: calls.append(values), "ppi")
    gpu = FakeGpu({"stream_read": kernel})
    read = ReadKernel(b"cubin of stream_read", "stream_read")
    speed = streaming_read(gpu, read, nbytes=128 << 20)
    # Four kernels and the event after them.
    assert speed == 4 * (128 << 20) / 5
    assert {values[2] for values in calls} == {(128 << 20) // 16}
    assert calls[0][1] == calls[0][0] + (128 << 20)
    assert gpu.allocations == 0


def test_experts_are_read_back_layer_by_layer() -> None:
    """Two routers write their logits to the same scratch buffer, one after the other."""
    executor = toy_cuda().engine.executor
    gpu, plan = executor.runner.gpu, executor.plan
    arena = next(i for i, b in enumerate(plan.buffers) if b.space == "arena")
    start = next(i for i, b in enumerate(plan.buffers) if b.name == "prefill.row_start")
    layers = [RANDOM.permutation(3 * 6).reshape(3, 6).astype(np.float32) for _ in range(2)]
    live, queue = 2, list(layers)
    address = executor.runner._addresses[arena] + 64

    def routed(*_: int) -> None:
        gpu.view(address, 72)[:] = queue.pop(0).view(np.uint8).reshape(-1)

    entry = replace(plan.programs[0], launches=2)
    row_start = Binding(start, 16, (3,), "int32")
    logits = Binding(arena, 64, (3, 6), "float32")
    routers = tuple(RouterLogits(i, logits, row_start, 2) for i in range(2))
    executor.runner.described = lambda _: Program((), (), (), routers)
    executor.runner.program = lambda _: FakeLaunches()
    executor.write("prefill.row_start", np.array([0, 1, live], np.int32))
    gpu.launch = lambda _, stream: gpu.enqueue(stream, routed)
    distinct = [len({int(e) for row in x[:live] for e in np.argsort(row)[-2:]}) for x in layers]
    assert experts_touched(executor, entry) == np.mean(distinct)
    assert queue == []


class FakeLaunches:
    """Two launches without contents."""

    launches = (None, None)


def test_the_rate_counts_tokens_after_every_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(sweep_runs, "perf_counter", lambda: float(next(clock)))
    tokens = [TokenEvent(request, 1, "", False, 0.0) for request in (0, 0, 0, 1, 0, 1)]
    events = [*tokens, FinishEvent(0, None), FinishEvent(1, None)]  # type: ignore[arg-type]
    engine = SimpleNamespace(generate=lambda *_, **__: iter(events))
    prompts = [Prompt("a", prompt_ids=(1,)), Prompt("b", prompt_ids=(2,))]
    run = sweep_runs.timed_run(engine, prompts, GenerateParams(), None)  # type: ignore[arg-type]
    assert (run.whole_s, run.decode_s, run.decode_tokens) == (3.0, 1.0, 2)


def test_the_estimated_time_of_a_long_prompt_is_that_of_the_slowest() -> None:
    budget = Budget.of(60, [])
    budget.took_up(100, 10.0)
    budget.took_up(100, 1.0)
    assert not budget.allows("long", prompt_tokens=700)


def test_a_timeline_shows_the_middle_layer() -> None:
    def named(*names: str, section: str = TARGET) -> list[OpCall]:
        return [OpCall(name, {}, {}, {}, section) for name in names]

    layer = ("norm", "attend", "add", "experts", "add")
    step = [*named("norm", section=level_section(1)), *named("embed", *layer * 4, "norm")]
    assert middle_layer(step, 4) == (1, range(8, 13))
    # An op that each layer has once marks its beginning; "norm" is called five times.
    assert step[8].op == "attend"
    assert middle_layer(step, 3) == (1, range(0))
    assert middle_layer(named(*layer), 1) == (0, range(0))
