"""Step and prefill times of an estimate: from a file, from an engine and a sweep, or measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.builder.durable import replace_bytes
from specbuild.builder.progress import Progress
from specbuild.cli.bench.report import SweepReport
from specbuild.cli.estimate.options import CostOptions
from specbuild.cli.terminal.console import json_line
from specbuild.runtime.draft.device_costs import read_step_costs
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.strict_json import from_json, parsed
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.measure.serving.costs import ServingCosts

_PREFILL = "prefill"


def costs_for(
    directory: Path,
    manifest: Manifest,
    options: CostOptions,
    contexts: tuple[int, ...],
    progress: Progress,
) -> ServingCosts:
    """Return the costs of an engine, and write them to ``save_costs`` if requested.

    Raises SpecbuildError if a file has none, or they are of another GPU than requested.
    """
    if options.costs is not None:
        costs = _from_file(options.costs, directory, manifest)
    elif facts_of(manifest.backend).has_plan:
        raise SpecbuildError(
            f"{directory} runs on a GPU: give --costs the JSON of 'specbuild bench sweep "
            f"{directory} prefill --json', or that of --save-costs"
        )
    else:
        costs = _measured(directory, options, contexts, progress)
    if options.gpu is not None and options.gpu.lower() not in costs.machine.lower():
        raise SpecbuildError(
            f"--gpu {options.gpu}: the costs were measured on {costs.machine}; measure there with "
            "'specbuild tune' and 'specbuild bench sweep ENGINE prefill'"
        )
    if options.save_costs is not None:
        replace_bytes(options.save_costs, f"{json_line(costs)}\n".encode())
    return costs


def _from_file(file: Path, directory: Path, manifest: Manifest) -> ServingCosts:
    try:
        data: Any = parsed(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecbuildError(f"--costs {file} cannot be read as JSON ({error})") from error
    if isinstance(data, dict) and "phases" in data:
        sweep = from_json(SweepReport, data, str(file))
        return _of_sweep(sweep, file, directory, manifest)
    return from_json(ServingCosts, data, str(file))


def _of_sweep(sweep: SweepReport, file: Path, directory: Path, manifest: Manifest) -> ServingCosts:
    """Return costs: prompts of a sweep, and the steps that ``tune`` stored in the engine."""
    steps = read_step_costs(directory, manifest)
    if steps is None:
        raise SpecbuildError(
            f"{directory} holds no step costs: measure them with 'specbuild tune {directory} "
            "--skip-tactics' on its GPU"
        )
    prompts = {phase.rows: phase.time_s for phase in sweep.phases if phase.sweep == _PREFILL}
    if not prompts:
        raise SpecbuildError(f"--costs {file} times no prompts: it needs the phase {_PREFILL}")
    if not sweep.gpu.startswith(steps.gpu):
        raise SpecbuildError(
            f"--costs {file} is of {sweep.gpu}, the step costs of {directory} are of {steps.gpu}"
        )
    return ServingCosts(
        machine=steps.gpu,
        chunk_rows=manifest.limits.max_rows,
        prompt_tokens=tuple(sorted(prompts)),
        prompt_s=tuple(prompts[tokens] for tokens in sorted(prompts)),
        steps=steps.steps,
    )


def _measured(
    directory: Path, options: CostOptions, contexts: tuple[int, ...], progress: Progress
) -> ServingCosts:
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.measure.serving.host_measurement import (
        measure_host_costs,
        measurements,
    )

    engine, drafted = load_engine(directory), options.acceptance > 0
    if engine.executor.capabilities.device_step:
        raise UnsupportedHereError(f"{directory}: its steps run on a device; give --costs")
    num_measurements = measurements(engine, contexts, drafted=drafted)
    progress.start("measuring costs", num_measurements, "measurements")
    return measure_host_costs(
        engine,
        engine.manifest.device,
        contexts,
        drafted=drafted,
        done=lambda: progress.advance(1),
    )


def with_draft(costs: ServingCosts, *, drafted: bool) -> ServingCosts:
    """Return the costs, without those of drafts if no draft is used."""
    if drafted:
        return costs
    return replace(costs, steps=tuple(entry for entry in costs.steps if entry.shape is None))
