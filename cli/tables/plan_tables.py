"""The programs and kernels of a CUDA engine, as ``inspect`` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table

from specbuild.cli.terminal.console import size_text
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import Plan, Program, ProgramEntry
from specbuild.runtime.executors.cuda.program_file import read_program


@dataclass(frozen=True)
class ProgramFacts:
    """A program: its launches, their distinct kernels, and its scratch.

    ``exchange_rounds`` is the number of exchanges between the GPUs of an engine.
    """

    name: str
    kind: str
    batch: int
    rows: int
    launches: int
    kernels: int
    arena_bytes: int
    exchange_rounds: int = 0


@dataclass(frozen=True)
class KernelFacts:
    """The variants of one kernel, with the maximum of each resource, by thread and block."""

    name: str
    variants: int
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class PlanFacts:
    """The contents of a plan besides weights and caches."""

    programs: tuple[ProgramFacts, ...]
    kernels: tuple[KernelFacts, ...]


def plan_facts(directory: Path, manifest: Manifest, plan: Plan) -> PlanFacts:
    """Read the files of all programs. Raises EngineFileError if one is damaged."""

    def facts(entry: ProgramEntry) -> ProgramFacts:
        data = bytes(read_file(directory, manifest, entry.file))
        return _program(entry, read_program(data, entry))

    return PlanFacts(tuple(map(facts, plan.programs)), _kernels(plan))


def plan_tables(facts: PlanFacts) -> Group:
    """Return the programs, then the kernels."""
    programs = Table(title="programs", title_justify="left")
    programs.add_column("program", overflow="fold")
    exchanges = any(program.exchange_rounds for program in facts.programs)
    columns = ["sequences", "rows", "launches", "kernels", "scratch memory"]
    for column in [*columns, *(["exchange rounds"] if exchanges else [])]:
        programs.add_column(column, justify="right")
    for program in facts.programs:
        counts = [program.batch, program.rows, program.launches, program.kernels]
        rounds = [str(program.exchange_rounds)] if exchanges else []
        programs.add_row(program.name, *map(str, counts), size_text(program.arena_bytes), *rounds)
    kernels = Table(title="kernels", title_justify="left")
    kernels.add_column("kernel", overflow="fold")
    for column in ("variants", "registers", "spilled bytes", "static shared memory"):
        kernels.add_column(column, justify="right")
    for kernel in facts.kernels:
        counts = [kernel.variants, kernel.registers, kernel.spill_bytes]
        kernels.add_row(kernel.name, *map(str, counts), size_text(kernel.shared_bytes))
    return Group(programs, kernels)


def _program(entry: ProgramEntry, program: Program) -> ProgramFacts:
    return ProgramFacts(
        name=entry.name,
        kind=entry.kind,
        batch=entry.batch,
        rows=entry.rows,
        launches=len(program.launches),
        kernels=len({launch.kernel for launch in program.launches}),
        arena_bytes=max(
            (lifetime.offset + lifetime.bytes for lifetime in program.lifetimes), default=0
        ),
        exchange_rounds=entry.rounds,
    )


def _kernels(plan: Plan) -> tuple[KernelFacts, ...]:
    names: dict[str, list[int]] = {}
    for i, kernel in enumerate(plan.kernels):
        names.setdefault(kernel.name, []).append(i)
    return tuple(_kernel(plan, name, names[name]) for name in sorted(names))


def _kernel(plan: Plan, name: str, indices: Sequence[int]) -> KernelFacts:
    variants = [plan.kernels[i] for i in indices]
    return KernelFacts(
        name=name,
        variants=len(variants),
        registers=max(kernel.registers for kernel in variants),
        spill_bytes=max(kernel.spill_bytes for kernel in variants),
        shared_bytes=max(kernel.shared_bytes for kernel in variants),
    )
