"""The programs of a written plan, as they were before they were lowered."""

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
    """What ``PlanWriter`` takes, but for launches; tensors of the plan share its storages."""

    plan: Plan
    programs: tuple[tuple[ProgramEntry, ProgramIr], ...]
    weights: tuple[Tensor, ...]
    caches: tuple[Tensor, ...]
    exchanges: tuple[Tensor, ...]
    ports: dict[str, Tensor]


def read_programs(plan: Plan, read: Callable[[str], bytes]) -> ReadPlan:
    """The op calls of every program. ``read`` gives a file of the engine.

    Raises EngineFileError where a program holds what this version cannot lower again.
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

    def whole(space: str) -> tuple[Tensor, ...]:
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
        plan, tuple(programs), whole("weights"), whole("cache"), whole("exchange"), ports
    )


def _program(entry: ProgramEntry, program: Program, storages: Sequence[Storage]) -> ProgramIr:
    pieces = _Pieces(entry.name, program.lifetimes, storages)
    calls = [pieces.call(index, call) for index, call in enumerate(program.ops)]
    phase: ProgramPhase = "refresh" if entry.reverified else "decode"
    return ProgramIr(entry.name, "prefill" if entry.kind == "prefill" else phase, calls)


class _Pieces:
    """Finds the storage of a binding: a buffer, or the piece of the arena that lives there."""

    def __init__(
        self, name: str, lifetimes: tuple[Lifetime, ...], storages: Sequence[Storage]
    ) -> None:
        self._storages = storages
        self._pieces = [
            (life, Storage(f"{name}/{i}", "arena", life.bytes)) for i, life in enumerate(lifetimes)
        ]

    def call(self, index: int, call: OpCall) -> Call:
        """The op call of this index."""
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
        found = [
            (life, piece)
            for life, piece in self._pieces
            if life.first <= index <= life.last
            and life.offset <= binding.offset
            and end <= life.offset + life.bytes
        ]
        if len(found) != 1:
            raise ValueError(f"op {index} uses the arena at {binding.offset}, where nothing lives")
        life, piece = found[0]
        return Tensor(piece, binding.offset - life.offset, info)
