"""``specbuild tune``: times the tactics of an engine's shapes and rewrites its plan with the best.

The programs are read back from the plan, so neither the checkpoint nor the weights are needed.
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
from specbuild.builder.backends.cuda.tuning.relower import REPORT_FILE, relowered, report_with
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
    """What ``specbuild tune`` is asked for; ``context`` is how many tokens a sequence holds.

    ``programs`` are those whose shapes are wanted, None for all.
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
        """The tactic file."""
        engine = self.engine.resolve()
        return self.output or engine.with_name(f"{engine.name}.tactics.json")


@dataclass(frozen=True)
class TuneReport:
    """``left`` shapes were not reached in time; ``tactics`` is what the engine uses now."""

    device: str
    file: str
    shapes: int
    measured: tuple[TunedShape, ...]
    left: int
    tactics: TacticsReport
    seconds: float


class TimerOf(Protocol):
    """Makes the timer, once it is known that there is something to time."""

    def __call__(self, compiler: Compiler) -> CandidateTimer:
        """A timer whose kernels this compiler compiles."""
        ...


def tune_engine(
    options: TuneOptions, progress: Progress, timer_of: TimerOf | None = None
) -> TuneReport:
    """Measures, writes the tactic file, and rewrites the engine's plan, kernels and report.

    Raises UnsupportedHereError where the engine does not run on this machine, SpecbuildError for
    a wrong option, a tactic file of another GPU, or an engine of another version of specbuild.
    """
    began = time.monotonic()
    manifest = read_manifest(options.engine)
    check_sizes(options.engine, manifest)
    if not facts_of(manifest.backend).has_plan:
        raise SpecbuildError(
            f"{options.engine} was built for {manifest.backend}, which has no tactics; tune an "
            "engine of build --backend cuda"
        )
    _require_ops(options.ops)
    if timer_of is None:
        reasons = check_here(manifest, options.engine)
        if reasons:
            raise UnsupportedHereError(f"{options.engine} cannot be tuned here: {reasons[0]}")
        timer_of = partial(GpuTimer, context=options.context)

    def read(name: str) -> bytes:
        return bytes(read_file(options.engine, manifest, name))

    found = read_programs(read_plan(options.engine, manifest), read)
    target = Target(arch=found.plan.gpu, multiprocessors=found.plan.multiprocessors)
    compiler = Compiler(target.arch)
    timer = timer_of(compiler)
    code, empty = MeasuredCode(target, compiler), tactic_file(target.arch, timer.device, ())
    start, known = _start(options, code, empty, progress)
    shapes = shapes_of(_of_programs(found, options.programs), target)
    wanted = [shape for shape in shapes if _is_wanted(shape, options, known)]
    if len(wanted) < len(shapes):
        progress.note(f"{len(shapes) - len(wanted)} of {len(shapes)} shapes are left as they are")
    deadline = math.inf if options.seconds is None else began + options.seconds
    compiler.adopt(default_kernels(wanted), found.plan.kernels, read)
    try:
        entries, measured = measure_all(wanted, compiler, timer, progress, deadline)
    finally:
        timer.close()
    write_tactics(options.file, file := start.with_entries(map(code.recorded, entries)))
    engine = relowered(found, TacticBook(file, options.file.name), compiler, read, progress)
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
        left=len(wanted) - len(measured),
        tactics=engine.report.tactics,
        seconds=time.monotonic() - began,
    )


def _require_ops(names: tuple[str, ...]) -> None:
    tunable = [op.name for op in all_ops().values() if op.tactics is not None]
    unknown = sorted(set(names) - set(tunable))
    if unknown:
        raise SpecbuildError(
            f"--ops {','.join(unknown)}: no such op has tactics; those are {', '.join(tunable)}"
        )


def _start(
    options: TuneOptions, code: MeasuredCode, empty: TacticFile, progress: Progress
) -> tuple[TacticFile, set[str]]:
    """What the new file begins with, and the keys that need not be measured again.

    An existing file is added to; else what is shipped for this GPU fills in what is not measured.
    """
    path = options.file
    if not path.parent.is_dir():
        raise SpecbuildError(f"--output {path}: there is no such folder; make it first")
    if path.resolve().is_relative_to(options.engine.resolve()):
        raise SpecbuildError(
            f"--output {path} lies in the engine, which holds its own files only; choose another "
            "place"
        )
    if not path.exists():
        shipped, _ = code.held(shipped_tactics(empty.gpu).file)
        return shipped if shipped.device == empty.device else empty, set()
    found = read_tactics(path)
    if (found.gpu, found.device) != (empty.gpu, empty.device):
        raise SpecbuildError(
            f"{path} was measured on {found.device} ({found.gpu}), this GPU is {empty.device} "
            f"({empty.gpu}); choose another --output"
        )
    held, refused = code.held(found)
    if refused:
        progress.note(f"{path}: {len(refused)} tactics of other kernels are dropped")
    return held, set() if options.force else {entry.key for entry in held.entries}


def _of_programs(found: ReadPlan, names: frozenset[str] | None) -> ReadPlan:
    """The plan with these programs alone; SpecbuildError names one that it does not have."""
    if names is None:
        return found
    unknown = names - {entry.name for entry, _ in found.programs}
    if unknown:
        raise SpecbuildError(f"the engine has no program {min(unknown)}: measure this engine again")
    kept = tuple((entry, program) for entry, program in found.programs if entry.name in names)
    return replace(found, programs=kept)


def _is_wanted(shape: Shape, options: TuneOptions, known: set[str]) -> bool:
    asked = not options.ops or shape.op.name in options.ops
    few = options.max_rows is None or shape.rows <= options.max_rows
    return asked and few and shape.key not in known


def _is_plan(name: str) -> bool:
    return name.partition("/")[0] in (PROGRAM_FOLDER, KERNEL_FOLDER)
