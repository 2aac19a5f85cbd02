"""``specbuild tune``: times the tactics of an engine's shapes and rewrites its plan with the best.

The programs are read from the plan, so neither the checkpoint nor the weights are needed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from specbuild.builder.backends.cuda.compile.nvrtc import KERNEL_FOLDER, Compiler
from specbuild.builder.backends.cuda.engine import PROGRAM_FOLDER
from specbuild.builder.backends.cuda.plan.plan_reader import ReadPlan, read_programs
from specbuild.builder.backends.cuda.tactics.measured_code import MeasuredCode
from specbuild.builder.backends.cuda.tactics.tactic_book import (
    TacticBook,
    TacticsReport,
    shipped_tactics,
)
from specbuild.builder.backends.cuda.tactics.tactic_file import (
    TacticFile,
    read_tactics,
    tactic_file,
    write_tactics,
)
from specbuild.builder.backends.cuda.tuning.choice import (
    Shape,
    TunedShape,
    default_kernels,
    measure_all,
    shapes_of,
)
from specbuild.builder.backends.cuda.tuning.relower import REPORT_FILE, relower, report_with
from specbuild.builder.backends.cuda.tuning.timer import CandidateTimer, GpuTimer
from specbuild.builder.engine.rewrite import rewrite_engine
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Target
from specbuild.plugins_cuda.registry import all_ops
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.files import check_sizes, read_file, read_manifest
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.check import read_plan
from specbuild.runtime.executors.registry import check_here


@dataclass(frozen=True)
class TuneOptions:
    """The options of ``specbuild tune``; ``context`` is the number of tokens per sequence.

    ``programs`` selects the programs whose shapes are measured; None selects all.
    """

    engine: Path
    output: Path | None = None
    ops: tuple[str, ...] = ()
    max_rows: int | None = None
    programs: frozenset[str] | None = None
    context: int = 1024
    seconds: float | None = None
    force: bool = False

    @property
    def file(self) -> Path:
        """The path of the tactic file."""
        engine = self.engine.resolve()
        return self.output or engine.with_name(f"{engine.name}.tactics.json")


@dataclass(frozen=True)
class TuneReport:
    """The result: ``left`` counts shapes not reached in time, ``tactics`` describes the engine."""

    device: str
    file: str
    shapes: int
    measured: tuple[TunedShape, ...]
    left: int
    tactics: TacticsReport
    seconds: float


class TimerFactory(Protocol):
    """Makes the timer after all checks that need no GPU."""

    def __call__(self, compiler: Compiler) -> CandidateTimer:
        """Return a timer whose kernels this compiler compiles."""
        ...


def tune_engine(
    options: TuneOptions, progress: Progress, make_timer: TimerFactory | None = None
) -> TuneReport:
    """Measure, write the tactic file, and rewrite the engine's plan, kernels and report.

    Raises UnsupportedHereError if the engine does not run on this machine. Raises SpecbuildError
    for an invalid option, a tactic file of another GPU, or an engine of another version.
    """
    started = time.monotonic()
    manifest = read_manifest(options.engine)
    check_sizes(options.engine, manifest)
    if not facts_of(manifest.backend).has_plan:
        raise SpecbuildError(
            f"{options.engine} was built for {manifest.backend}, which has no tactics; tune an "
            "engine built with --backend cuda"
        )
    _require_ops(options.ops)
    if make_timer is None:
        reasons = check_here(manifest, options.engine)
        if reasons:
            raise UnsupportedHereError(f"{options.engine} cannot be tuned here: {reasons[0]}")
        make_timer = partial(GpuTimer, context=options.context)

    def read(name: str) -> bytes:
        return bytes(read_file(options.engine, manifest, name))

    source = read_programs(read_plan(options.engine, manifest), read)
    target = Target(arch=source.plan.gpu, multiprocessors=source.plan.multiprocessors)
    compiler = Compiler(target.arch)
    timer = make_timer(compiler)
    code, empty = MeasuredCode(target, compiler), tactic_file(target.arch, timer.device, ())
    initial, measured_keys = _start(options, code, empty, progress)
    shapes = shapes_of(_select_programs(source, options.programs), target)
    to_measure = [shape for shape in shapes if _needs_measurement(shape, options, measured_keys)]
    if len(to_measure) < len(shapes):
        progress.note(f"{len(shapes) - len(to_measure)} of {len(shapes)} shapes are not measured")
    deadline = math.inf if options.seconds is None else started + options.seconds
    compiler.adopt(default_kernels(to_measure), source.plan.kernels, read)
    try:
        entries, measured = measure_all(to_measure, compiler, timer, progress, deadline)
    finally:
        timer.close()
    write_tactics(options.file, file := initial.with_entries(map(code.recorded, entries)))
    engine = relower(source, TacticBook(file, options.file.name), compiler, read, progress)
    progress.start("rewriting the engine", 1, "step")
    rewrite_engine(
        options.engine,
        {**engine.files, REPORT_FILE: report_with(read(REPORT_FILE), engine.report)},
        [name for name in manifest.files if _is_plan(name) and name not in engine.files],
    )
    assert engine.report.tactics is not None
    return TuneReport(
        device=timer.device,
        file=str(options.file),
        shapes=len(shapes),
        measured=tuple(measured),
        left=len(to_measure) - len(measured),
        tactics=engine.report.tactics,
        seconds=time.monotonic() - started,
    )


def _require_ops(names: tuple[str, ...]) -> None:
    tunable = [op.name for op in all_ops().values() if op.tactics is not None]
    unknown = sorted(set(names) - set(tunable))
    if unknown:
        raise SpecbuildError(
            f"--ops {','.join(unknown)}: expected ops with tactics: {', '.join(tunable)}"
        )


def _start(
    options: TuneOptions, code: MeasuredCode, empty: TacticFile, progress: Progress
) -> tuple[TacticFile, set[str]]:
    """Return the initial contents of the file, and the keys that need no measurement.

    An existing file is extended. Otherwise the shipped tactics for this GPU are the start.
    """
    path = options.file
    if not path.parent.is_dir():
        raise SpecbuildError(f"--output {path}: the folder does not exist; create it first")
    if path.resolve().is_relative_to(options.engine.resolve()):
        raise SpecbuildError(
            f"--output {path} is inside the engine, which must contain no other files; choose "
            "another path"
        )
    if not path.exists():
        shipped, _ = code.valid_entries(shipped_tactics(empty.gpu).file)
        return shipped if shipped.device == empty.device else empty, set()
    existing = read_tactics(path)
    if (existing.gpu, existing.device) != (empty.gpu, empty.device):
        raise SpecbuildError(
            f"{path} was measured on {existing.device} ({existing.gpu}), but this GPU is "
            f"{empty.device} ({empty.gpu}); choose another --output"
        )
    valid, refused = code.valid_entries(existing)
    if refused:
        progress.note(f"{path}: {len(refused)} tactics of other kernels are dropped")
    return valid, set() if options.force else {entry.key for entry in valid.entries}


def _select_programs(source: ReadPlan, names: frozenset[str] | None) -> ReadPlan:
    """Select programs of the plan. SpecbuildError for a name that it does not have."""
    if names is None:
        return source
    unknown = names - {entry.name for entry, _ in source.programs}
    if unknown:
        raise SpecbuildError(f"the engine has no program {min(unknown)}; measure this engine again")
    selected = tuple((entry, program) for entry, program in source.programs if entry.name in names)
    return replace(source, programs=selected)


def _needs_measurement(shape: Shape, options: TuneOptions, measured_keys: set[str]) -> bool:
    is_selected = not options.ops or shape.op.name in options.ops
    is_small = options.max_rows is None or shape.rows <= options.max_rows
    return is_selected and is_small and shape.key not in measured_keys


def _is_plan(name: str) -> bool:
    return name.partition("/")[0] in (PROGRAM_FOLDER, KERNEL_FOLDER)
