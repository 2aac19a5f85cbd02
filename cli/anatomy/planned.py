"""The anatomy of an engine's steps from its plan, without a GPU."""

from __future__ import annotations

from pathlib import Path

from specbuild.cli.anatomy.options import AnatomyOptions
from specbuild.cli.bench.steps import draft_text, shapes_for
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.check import read_plan
from specbuild.runtime.executors.cuda.program_file import read_program
from specbuild.runtime.measure.anatomy import StepAnatomy, step_anatomy
from specbuild.runtime.measure.byte_floor import Work

CONTEXT = 1000


def planned_anatomies(
    directory: Path, manifest: Manifest, options: AnatomyOptions
) -> list[StepAnatomy]:
    """Return a step without a draft, and one with the deepest chain that is built for the batch.

    The number of experts is that of random routing. Raises SpecbuildError for values above the
    engine's limits, and UnsupportedHereError for an engine without a plan.
    """
    if not facts_of(manifest.backend).has_plan:
        raise UnsupportedHereError(
            f"--anatomy reads the plans of CUDA engines, {directory} was built for "
            f"{manifest.backend}; leave it out, or build the engine with --backend cuda"
        )
    limits = manifest.limits
    context = min(CONTEXT, limits.max_seq_len) if options.context is None else options.context
    if options.batch > limits.max_batch_size or context > limits.max_seq_len:
        raise SpecbuildError(
            f"--anatomy: the engine takes {limits.max_batch_size} sequences of "
            f"{limits.max_seq_len} tokens, asked for {options.batch} of {context}"
        )
    plan = read_plan(directory, manifest)
    table = ProgramTable(plan)
    sparse = manifest.dsa is not None and context >= manifest.dsa.threshold

    def planned(shape: DraftShape | None) -> StepAnatomy:
        entry = table.step(shape, batch=options.batch, full_logits=False, sparse=sparse)
        program = read_program(bytes(read_file(directory, manifest, entry.file)), entry)
        work = Work(options.batch * (entry.draft_tokens + 1), options.batch, context)
        return step_anatomy(
            plan, entry, program, work,
            draft=draft_text(shape), bytes_per_s=options.read_speed * 1e12,
        )  # fmt: skip

    return [planned(shape) for shape in (None, *shapes_for(table, options.batch)[-1:])]
