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
    asked: CostOptions,
    contexts: tuple[int, ...],
    progress: Progress,
) -> ServingCosts:
    """The costs of an engine, written to ``save_costs`` where that is asked for.

    Raises SpecbuildError where a file holds none, or they are of another GPU than is asked for.
    """
    if asked.costs is not None:
        found = _from_file(asked.costs, directory, manifest)
    elif facts_of(manifest.backend).has_plan:
        raise SpecbuildError(
            f"{directory} runs on a GPU: give --costs the JSON of 'specbuild bench sweep "
            f"{directory} prefill --json', or that of --save-costs"
        )
    else:
        found = _measured(directory, asked, contexts, progress)
    if asked.gpu is not None and asked.gpu.lower() not in found.machine.lower():
        raise SpecbuildError(
            f"--gpu {asked.gpu}: the costs were measured on {found.machine}; measure there with "
            "'specbuild tune' and 'specbuild bench sweep ENGINE prefill'"
        )
    if asked.save_costs is not None:
        replace_bytes(asked.save_costs, f"{json_line(found)}\n".encode())
    return found


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
    """Prompts of a sweep, and the steps that ``tune`` stored in the engine."""
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
    directory: Path, asked: CostOptions, contexts: tuple[int, ...], progress: Progress
) -> ServingCosts:
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.measure.serving.host_measurement import (
        measure_host_costs,
        measurements,
    )

    engine, drafted = load_engine(directory), asked.acceptance > 0
    if engine.executor.capabilities.device_step:
        raise UnsupportedHereError(f"{directory}: its steps run on a device; give --costs")
    wanted = measurements(engine, contexts, drafted=drafted)
    progress.start("measuring costs", wanted, "measurements")
    return measure_host_costs(
        engine,
        engine.manifest.device,
        contexts,
        drafted=drafted,
        done=lambda: progress.advance(1),
    )


def with_draft(costs: ServingCosts, *, drafted: bool) -> ServingCosts:
    """The costs, without those of drafts where none is made."""
    if drafted:
        return costs
    return replace(costs, steps=tuple(entry for entry in costs.steps if entry.shape is None))
