"""Lowers and compiles the programs of a written plan again, by another book of tactics."""

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


def relowered(
    found: ReadPlan,
    book: TacticBook,
    compiler: Compiler,
    read: Callable[[str], bytes],
    progress: Progress,
) -> CudaEngine:
    """What a build with this book would have written, weights aside.

    ``read`` gives the engine's cubins, which are taken over where their sources are the same.
    Raises SpecbuildError as a build does.
    """
    target = Target(arch=found.plan.gpu, multiprocessors=found.plan.multiprocessors)

    def make(lowering: CallLowering) -> tuple[CudaEngine, NamedPrograms] | Unsupported:
        writer, programs = lowered_again(found, lowering)
        compiler.adopt(writer.kernels, found.plan.kernels, read)
        engine = compile_programs(writer, programs, target, compiler, progress)
        return engine if isinstance(engine, Unsupported) else (engine, programs)

    lowering, (engine, programs) = without_spills(target, book, make)
    choices = lowering.choices(program for _, program in programs)
    tactics = tactics_report(lowering.tactics, choices)
    report = replace(engine.report, tactics=tactics, left_out=lowering.left_out)
    return replace(engine, report=report)


def lowered_again(found: ReadPlan, lower: Lower) -> tuple[PlanWriter, NamedPrograms]:
    """The programs by this lowering, and the writer that numbers buffers as the plan does."""
    lowered = [(entry, lower_program(program, lower)) for entry, program in found.programs]
    programs = tuple(
        (replace(entry, launches=sum(len(each.launches) for each in program.lowerings)), program)
        for entry, program in lowered
    )
    writer = PlanWriter(
        [program for _, program in programs],
        found.weights,
        found.caches,
        found.ports,
        found.exchanges,
        found.plan.ranks,
    )
    return writer, programs


def report_with(data: bytes, report: CudaReport) -> bytes:
    """A build report whose part on the GPU is replaced."""
    return json_bytes({**json.loads(data), "cuda": to_json(report)})
