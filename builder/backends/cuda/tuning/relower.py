"""Lowers and compiles the programs of a written plan again, with another book of tactics."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.engine import CudaEngine, NamedPrograms, compile_programs
from specbuild.builder.backends.cuda.plan.plan_reader import ReadPlan
from specbuild.builder.backends.cuda.plan.plan_writer import (
    Lower,
    PlanWriter,
    lower_program,
)
from specbuild.builder.backends.cuda.report import CudaReport
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering, without_spills
from specbuild.builder.backends.cuda.tactics.tactic_book import TacticBook, tactics_report
from specbuild.builder.engine.writer import json_bytes
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Target, Unsupported
from specbuild.runtime.engine_dir.strict_json import to_json

REPORT_FILE = "build_report.json"


def relower(
    source: ReadPlan,
    book: TacticBook,
    compiler: Compiler,
    read: Callable[[str], bytes],
    progress: Progress,
) -> CudaEngine:
    """Return the result of a build with this book, without weights.

    ``read`` loads the engine's cubins, which are reused if their sources are unchanged. Raises
    SpecbuildError like a build.
    """
    target = Target(arch=source.plan.gpu, multiprocessors=source.plan.multiprocessors)

    def compile_with(lowering: CallLowering) -> tuple[CudaEngine, NamedPrograms] | Unsupported:
        writer, programs = lower_again(source, lowering)
        compiler.adopt(writer.kernels, source.plan.kernels, read)
        engine = compile_programs(writer, programs, target, compiler, progress)
        return engine if isinstance(engine, Unsupported) else (engine, programs)

    lowering, (engine, programs) = without_spills(target, book, compile_with)
    choices = lowering.choices(program for _, program in programs)
    tactics = tactics_report(lowering.tactics, choices)
    report = replace(engine.report, tactics=tactics, left_out=lowering.left_out)
    return replace(engine, report=report)


def lower_again(source: ReadPlan, lower: Lower) -> tuple[PlanWriter, NamedPrograms]:
    """Return the lowered programs, and the writer with the buffer indices of the plan."""
    lowered = [(entry, lower_program(program, lower)) for entry, program in source.programs]
    programs = tuple(
        (
            replace(entry, launches=sum(len(lowering.launches) for lowering in program.lowerings)),
            program,
        )
        for entry, program in lowered
    )
    writer = PlanWriter(
        [program for _, program in programs],
        source.weights,
        source.caches,
        source.ports,
        source.exchanges,
        source.plan.ranks,
    )
    return writer, programs


def report_with(data: bytes, report: CudaReport) -> bytes:
    """Return a build report with its CUDA part replaced."""
    return json_bytes({**json.loads(data), "cuda": to_json(report)})
