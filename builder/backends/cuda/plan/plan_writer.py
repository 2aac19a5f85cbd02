"""Writes programs of op calls as a plan: launches and a location for every tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from specbuild.builder.backends.cuda.plan.memory_placement import Span, aligned, place
from specbuild.builder.backends.cuda.step.ir import Call, ProgramIr, Storage, Tensor
from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    OpLaunch,
    PeerPointer,
    ProgramPhase,
    RankNumber,
    Target,
    Unsupported,
)
from specbuild.plugins_cuda.traffic import NoTraffic, TrafficRequest
from specbuild.runtime.engine_dir.features import stored_keys
from specbuild.runtime.engine_dir.plan import (
    FLOAT32,
    INT32,
    NULL,
    PEER,
    POINTER,
    RANK,
    ZEROED,
    Binding,
    Buffer,
    CompiledKernel,
    Launch,
    Lifetime,
    OpCall,
    Plan,
    Port,
    Program,
    ProgramEntry,
    RouterLogits,
)
from specbuild.runtime.engine_dir.tensor_table import with_table
from specbuild.runtime.engine_dir.traffic import Traffic
from specbuild.runtime.errors import SpecbuildError

ARENA = "arena"

Lower = Callable[[Call, ProgramPhase], Lowering | Unsupported]


@dataclass(frozen=True)
class LoweredProgram:
    """A program's calls with their launches, and the arena offset of every scratch tensor."""

    ir: ProgramIr
    lowerings: tuple[Lowering, ...]
    offsets: Mapping[Storage, int]
    spans: Mapping[Storage, Span]
    workspaces: tuple[Mapping[str, tuple[Storage, int]], ...]
    arena_bytes: int
    zeroed_bytes: int

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels in the order of launches."""
        return [launch.kernel for lowering in self.lowerings for launch in lowering.launches]


_ZEROED_STORAGE = Storage(ZEROED, "state", 0)


def lower_program(program: ProgramIr, lower: Lower) -> LoweredProgram:
    """Lower every call and plan the arena. Raises SpecbuildError if a call has no kernel."""
    lowerings = lowered_calls(program, lower)
    if isinstance(lowerings, Unsupported):
        raise SpecbuildError(lowerings.reason)
    spans: dict[Storage, Span] = {}
    workspaces = []
    zeroed_bytes = 0
    for index, (call, lowering) in enumerate(zip(program.calls, lowerings, strict=True)):
        for tensor in call.tensors.values():
            storage = tensor.storage
            if storage.space == "arena":
                first = spans[storage].first if storage in spans else index
                spans[storage] = Span(storage.bytes, first, index)
        places: dict[str, tuple[Storage, int]] = {}
        used = 0
        for workspace in lowering.workspaces:
            if workspace.zeroed:
                places[workspace.name] = (_ZEROED_STORAGE, used)
                used += aligned(workspace.nbytes)
            else:
                storage = Storage(f"{index}.{workspace.name}", "arena", workspace.nbytes)
                spans[storage] = Span(workspace.nbytes, index, index)
                places[workspace.name] = (storage, 0)
        zeroed_bytes = max(zeroed_bytes, used)
        workspaces.append(places)
    offsets, arena_bytes = place(list(spans.values()))
    return LoweredProgram(
        program,
        lowerings,
        dict(zip(spans, offsets, strict=True)),
        spans,
        tuple(workspaces),
        arena_bytes,
        zeroed_bytes,
    )


def lowered_calls(program: ProgramIr, lower: Lower) -> tuple[Lowering, ...] | Unsupported:
    """Return the lowering of every call, or why the first unsupported call has none."""
    lowerings = []
    for call in program.calls:
        lowering = lower(call, program.phase)
        if isinstance(lowering, Unsupported):
            return lowering
        lowerings.append(lowering)
    return tuple(lowerings)


@dataclass
class PlanWriter:
    """Assigns indices to buffers and kernels, and writes programs that refer to them."""

    programs: list[LoweredProgram]
    weights: Iterable[Tensor]
    caches: Iterable[Tensor]
    ports: Mapping[str, Tensor]
    exchanges: Iterable[Tensor] = ()
    ranks: int = 1
    buffers: list[Buffer] = field(init=False)
    kernels: list[Kernel] = field(init=False)

    def __post_init__(self) -> None:
        # Ports can share a storage.
        ports = dict.fromkeys(t.storage for t in self.ports.values())
        tensors = (*self.weights, *self.caches, *self.exchanges)
        storages = [*(t.storage for t in tensors), *ports]
        self.buffers = [Buffer(s.name, s.space, s.bytes) for s in storages]
        zeroed = max((p.zeroed_bytes for p in self.programs), default=0)
        arena = max((p.arena_bytes for p in self.programs), default=0)
        self.buffers += [Buffer(ZEROED, "state", zeroed), Buffer(ARENA, "arena", arena)]
        self._index = {buffer.name: i for i, buffer in enumerate(self.buffers)}
        if len(self._index) != len(self.buffers):
            raise AssertionError("two buffers share a name")
        used = (kernel for program in self.programs for kernel in program.kernels)
        self.kernels = list(dict.fromkeys(used))
        self._kernel_index = {kernel: i for i, kernel in enumerate(self.kernels)}

    def plan(
        self,
        target: Target,
        driver_version: int,
        compiled: Mapping[Kernel, CompiledKernel],
        entries: Iterable[ProgramEntry],
    ) -> Plan:
        """Return the contents of ``plan.json``. Every kernel must be compiled."""
        return Plan(
            gpu=target.arch,
            multiprocessors=target.multiprocessors,
            driver_version=driver_version,
            buffers=tuple(self.buffers),
            kernels=tuple(compiled[kernel] for kernel in self.kernels),
            ports=tuple(
                Port(name, self._index[t.storage.name], t.offset, t.shape, t.info.dtype)
                for name, t in self.ports.items()
            ),
            programs=tuple(entries),
            ranks=self.ranks,
        )

    def program(self, lowered: LoweredProgram) -> Program:
        """Return a program that refers to buffers and kernels by index."""
        calls, routers = [], []
        launches: list[Launch] = []
        previous: OpLaunch | None = None
        for index, (call, lowering) in enumerate(
            zip(lowered.ir.calls, lowered.lowerings, strict=True)
        ):
            inputs = {name: self._binding(lowered, t) for name, t in call.inputs.items()}
            outputs = {name: self._binding(lowered, t) for name, t in call.outputs.items()}
            traffic = call_traffic(call)
            calls.append(
                OpCall(call.op.name, call.attributes, inputs, outputs, call.section, traffic)
            )
            routers += self._routers(lowered, index, len(launches), traffic)
            for launch in lowering.launches:
                arguments = tuple(
                    self._argument(lowered, index, argument) for argument in launch.arguments
                )
                launches.append(
                    Launch(
                        kernel=self._kernel_index[launch.kernel],
                        op=index,
                        grid=launch.grid,
                        block=launch.block,
                        shared_bytes=launch.shared_bytes,
                        arguments=arguments,
                        programmatic=launch.may_start_early(previous),
                    )
                )
                previous = launch
        lifetimes = tuple(
            Lifetime(lowered.offsets[storage], span.bytes, span.first, span.last)
            for storage, span in lowered.spans.items()
        )
        return Program(tuple(calls), tuple(launches), lifetimes, tuple(routers))

    def _routers(
        self, lowered: LoweredProgram, index: int, launches: int, traffic: Traffic | None
    ) -> list[RouterLogits]:
        """Return where a call stores router logits; ``launches`` precede it in the program."""
        call, lowering = lowered.ir.calls[index], lowered.lowerings[index]
        routing = call.op.routing
        if routing is None or traffic is None:
            return []
        rows = call.tensors["x"].shape[0]
        name = routing.logits
        using = [i for i, launch in enumerate(lowering.launches) if name in launch.arguments]
        if not using:
            return []
        _, buffer, offset = self._argument(lowered, index, name)
        return [
            RouterLogits(
                launch=launches + using[0],
                logits=Binding(buffer, offset, (rows, traffic.experts), "float32"),
                row_start=self._binding(lowered, call.inputs[routing.row_start]),
                experts_per_token=traffic.experts_per_token,
                groups=routing.groups(call.attributes),
            )
        ]

    def _place(self, lowered: LoweredProgram, storage: Storage, offset: int) -> tuple[int, int]:
        if storage.space == "arena":
            return self._index[ARENA], lowered.offsets[storage] + offset
        return self._index[storage.name], offset

    def _binding(self, lowered: LoweredProgram, tensor: Tensor) -> Binding:
        buffer, offset = self._place(lowered, tensor.storage, tensor.offset)
        return Binding(buffer, offset, tensor.shape, tensor.info.dtype)

    def _argument(self, lowered: LoweredProgram, index: int, argument: Argument) -> tuple[int, ...]:
        if isinstance(argument, PeerPointer):
            _, *place = self._argument(lowered, index, argument.name)
            return (PEER, argument.distance, *place)
        if not isinstance(argument, str):
            return number_argument(argument)
        call = lowered.ir.calls[index]
        if argument in lowered.workspaces[index]:
            return (POINTER, *self._place(lowered, *lowered.workspaces[index][argument]))
        if argument in call.tensors:
            tensor = call.tensors[argument]
            return (POINTER, *self._place(lowered, tensor.storage, tensor.offset))
        call.op.tensor(argument)  # raises KeyError unless it is an absent optional tensor
        return (NULL,)


def number_argument(argument: int | float | RankNumber | None) -> tuple[int, ...]:
    """Encode a launch argument that is not a tensor: a number, the rank, or a null pointer.

    A float is encoded as its float32 bits.
    """
    if argument is None:
        return (NULL,)
    if isinstance(argument, RankNumber):
        return (RANK,)
    if isinstance(argument, float):
        return (FLOAT32, struct.unpack("<I", struct.pack("<f", argument))[0])
    return (INT32, argument)


def program_bytes(program: Program) -> bytes:
    """Return the contents of a program's file: JSON without spaces."""
    return json.dumps(with_table(stored_keys(program)), separators=(",", ":")).encode() + b"\n"


def call_traffic(call: Call) -> Traffic | None:
    """Return the traffic of a call, or None if the op declares it negligible."""
    stored = [name for name, tensor in call.inputs.items() if tensor.storage.space == "weights"]
    declared = call.op.traffic
    if declared is None or isinstance(declared, NoTraffic):
        if stored:
            raise AssertionError(f"{call.op.name} reads {stored} and declares no traffic")
        return None
    infos = {name: tensor.info for name, tensor in call.tensors.items()}
    return declared(TrafficRequest(infos, call.attributes, stored))
