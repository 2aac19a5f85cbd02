"""Reads the programs of a written plan back to op calls, so that they can be lowered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbuild.builder.backends.cuda.plan.plan_writer import ARENA
from specbuild.builder.backends.cuda.step.ir import Call, ProgramIr, Storage, Tensor
from specbuild.plugins_cuda.launches import ProgramPhase, TensorInfo
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import Binding, Lifetime, OpCall, Plan, Program, ProgramEntry
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.cuda.program_file import read_program


@dataclass(frozen=True)
class ReadPlan:
    """The inputs of ``PlanWriter`` without launches; all tensors share the storages of the plan."""

    plan: Plan
    programs: tuple[tuple[ProgramEntry, ProgramIr], ...]
    weights: tuple[Tensor, ...]
    caches: tuple[Tensor, ...]
    exchanges: tuple[Tensor, ...]
    ports: dict[str, Tensor]


def read_programs(plan: Plan, read: Callable[[str], bytes]) -> ReadPlan:
    """Return the op calls of every program. ``read`` returns the contents of the engine's files.

    Raises EngineFileError if a program has ops that this version cannot lower.
    """
    storages = [Storage(b.name, b.space, b.bytes) for b in plan.buffers]
    programs = []
    for entry in plan.programs:
        try:
            program = read_program(read(entry.file), entry)
            programs.append((entry, _program(entry, program, storages)))
        except (SpecbuildError, ValueError, KeyError, RecursionError) as error:
            raise EngineFileError(
                f"{entry.file} cannot be lowered again ({error}); build the engine with this "
                "version of specbuild"
            ) from error

    def space_tensors(space: str) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(storage, 0, TensorInfo((storage.bytes,), "uint8"))
            for storage in storages
            if storage.space == space
        )

    ports = {
        port.name: Tensor(storages[port.buffer], port.offset, TensorInfo(port.shape, port.dtype))
        for port in plan.ports
    }
    return ReadPlan(
        plan,
        tuple(programs),
        space_tensors("weights"),
        space_tensors("cache"),
        space_tensors("exchange"),
        ports,
    )


def _program(entry: ProgramEntry, program: Program, storages: Sequence[Storage]) -> ProgramIr:
    pieces = _Pieces(entry.name, program.lifetimes, storages)
    calls = [pieces.call(index, call) for index, call in enumerate(program.ops)]
    phase: ProgramPhase = "refresh" if entry.reverified else "decode"
    return ProgramIr(entry.name, "prefill" if entry.kind == "prefill" else phase, calls)


class _Pieces:
    """Maps a binding to its storage: a buffer, or a tensor of the arena by its lifetime."""

    def __init__(
        self, name: str, lifetimes: tuple[Lifetime, ...], storages: Sequence[Storage]
    ) -> None:
        self._storages = storages
        self._pieces = [
            (life, Storage(f"{name}/{i}", "arena", life.bytes)) for i, life in enumerate(lifetimes)
        ]

    def call(self, index: int, call: OpCall) -> Call:
        """Return the op call with this index."""
        op = op_named(call.op)
        inputs, outputs = (
            {op.tensor(name).name: self._tensor(index, binding) for name, binding in side.items()}
            for side in (call.inputs, call.outputs)
        )
        return Call(op, op.complete(call.attributes), inputs, outputs, call.section)

    def _tensor(self, index: int, binding: Binding) -> Tensor:
        info = TensorInfo(binding.shape, binding.dtype)
        storage = self._storages[binding.buffer]
        if storage.name != ARENA:
            return Tensor(storage, binding.offset, info)
        end = binding.offset + info.nbytes
        matches = [
            (life, piece)
            for life, piece in self._pieces
            if life.first <= index <= life.last
            and life.offset <= binding.offset
            and end <= life.offset + life.bytes
        ]
        if len(matches) != 1:
            raise ValueError(
                f"op {index} uses the arena at {binding.offset}, which is not allocated"
            )
        life, piece = matches[0]
        return Tensor(piece, binding.offset - life.offset, info)
