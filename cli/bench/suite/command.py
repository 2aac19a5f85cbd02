"""``bench suite``: loads the engine, runs the scenarios, and writes their results."""

from __future__ import annotations

from pathlib import Path

import typer

from specbuild.cli.bench.options import SuiteOptions
from specbuild.cli.bench.suite.junit import write_junit
from specbuild.cli.bench.suite.measurement import ByteFloor, SuiteRun
from specbuild.cli.bench.suite.scenarios import Suite, read_suite
from specbuild.cli.bench.suite.stored import stored_speeds
from specbuild.cli.bench.suite.table import suite_table
from specbuild.cli.bench.sweep import ceiling_of
from specbuild.cli.terminal import console
from specbuild.cli.terminal.engine_loading import load_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.measure.byte_floor import engine_traffic
from specbuild.runtime.settings import RuntimeSettings

EXIT_MISSED = 1


def run_suite(
    directory: Path,
    named: str,
    options: SuiteOptions,
    prompts: Path | None,
    *,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run the suite; exit with 1 if a scenario misses a threshold, or all were skipped."""
    suite, folder = read_suite(named)
    records = stored_speeds(options.record)
    engine = load_engine(directory, RuntimeSettings(threads=threads))
    executor = engine.executor
    on_gpu = executor if isinstance(executor, CudaExecutor) else None

    def say(text: str) -> None:
        console.messages().print(text, soft_wrap=True, markup=False)

    run = SuiteRun(
        engine=engine,
        folder=folder,
        prompts=prompts,
        floor=_floor(engine, on_gpu, suite),
        records=records,
        launched=dict if on_gpu is None else lambda: on_gpu.launched,
        say=say,
    )
    report = run.run(suite, name=directory.name, device=engine.manifest.device)
    if options.junit is not None:
        write_junit(report, options.junit)
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(suite_table(report))
    if not report.passed:
        raise typer.Exit(EXIT_MISSED)


def _floor(engine: Engine, executor: CudaExecutor | None, suite: Suite) -> ByteFloor | None:
    """Measure this only if a scenario requires it; SpecbuildError if it is impossible."""
    asking = [s.name for s in suite.scenarios if s.thresholds.byte_floor_ratio is not None]
    if not asking:
        return None
    if executor is None:
        raise SpecbuildError(
            f"scenario {asking[0]!r}: byte_floor_ratio needs a CUDA engine; omit it for this engine"
        )
    return ByteFloor(engine_traffic(executor.plan, executor.runner.described), ceiling_of(engine))
