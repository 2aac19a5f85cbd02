"""The part of ``specbuild tune`` that times complete steps and stores the table in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbuild.builder.progress import Progress
    from specbuild.cli.tables.step_cost_table import StepCostFacts


def tune_costs(path: Path, progress: Progress) -> StepCostFacts:
    """Measure the engine's step costs on this GPU and store them in its directory.

    Returns the table for ``inspect``. Raises UnsupportedHereError if the engine does not run here
    or its steps run on the host.
    """
    from specbuild.builder.engine.rewrite import rewrite_engine
    from specbuild.cli.tables.step_cost_table import step_cost_facts
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.draft.device_costs import STEP_COSTS_FILE, to_bytes
    from specbuild.runtime.engine_dir.files import read_manifest
    from specbuild.runtime.executors.cuda.check import read_plan
    from specbuild.runtime.measure.benchmark_batch import cuda_executor
    from specbuild.runtime.measure.step_measurement import measure_step_costs

    engine = load_engine(path)
    executor = cuda_executor(engine)
    progress.start("timing steps", 1, "table")
    try:
        costs = measure_step_costs(engine, progress.note)
    finally:
        executor.close()
    rewrite_engine(path, {STEP_COSTS_FILE: to_bytes(costs)})
    progress.advance(1)
    manifest = read_manifest(path)
    facts = step_cost_facts(path, manifest, read_plan(path, manifest))
    assert facts is not None
    return facts
