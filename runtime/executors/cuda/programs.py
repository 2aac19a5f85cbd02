"""Executable programs of a plan: packed arguments, loaded kernels, and recorded graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.engine_dir.plan import (
    FLOAT32,
    INT32,
    PEER,
    POINTER,
    RANK,
    ZEROED,
    CompiledKernel,
    Launch,
    Plan,
    Program,
    ProgramEntry,
)
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle, LaunchConfig
from specbuild.runtime.executors.cuda.kernel_arguments import KernelArguments, ReadFile
from specbuild.runtime.executors.cuda.program_file import read_launches, read_program
from specbuild.runtime.executors.cuda.shared_memory import shared_carveout


class KernelLibrary:
    """The plan's kernels; a cubin is read at the first use of one of its kernels."""

    def __init__(self, gpu: Gpu, kernels: Sequence[CompiledKernel], read_file: ReadFile) -> None:
        self._gpu = gpu
        self._kernels = kernels
        self._read_file = read_file
        # Cubins that were read and not loaded yet.
        self._waiting: dict[str, bytes] = {}
        self._arguments = KernelArguments(kernels, self._read_ahead)
        self._modules: dict[str, Handle] = {}
        self._functions: dict[int, Handle] = {}
        self._shared: dict[int, int] = {}

    def function(self, index: int, shared_bytes: int, threads: int) -> Handle:
        """Return a kernel that may use this dynamic shared memory and CTAs of this size."""
        kernel = self._kernels[index]
        if index not in self._functions:
            if kernel.cubin not in self._modules:
                cubin = self._waiting.pop(kernel.cubin, None) or self._read_file(kernel.cubin)
                self._modules[kernel.cubin] = self._gpu.load_module(cubin, kernel.cubin)
            module = self._modules[kernel.cubin]
            self._functions[index] = self._gpu.function(module, kernel.entry)
            self._shared[index] = -1
        if shared_bytes > self._shared[index]:
            carveout = shared_carveout(shared_bytes, kernel.registers, threads)
            self._gpu.set_shared(self._functions[index], shared_bytes, carveout)
            self._shared[index] = shared_bytes
        return self._functions[index]

    def check_arguments(self, launches: Sequence[Launch], where: str) -> None:
        """Raise EngineFileError if a launch passes other arguments than its kernel takes."""
        self._arguments.check(launches, where)

    def _read_ahead(self, name: str) -> bytes:
        self._waiting[name] = self._read_file(name)
        return self._waiting[name]


@dataclass(frozen=True)
class RankAddresses:
    """The addresses of a plan's buffers, as one rank sees them.

    ``own`` is on this rank, by buffer. ``peers[k − 1]`` is on rank (``rank`` + k) mod ranks.
    """

    own: Sequence[int]
    rank: int = 0
    peers: Sequence[Sequence[int]] = ()

    def packed(self, argument: Sequence[int]) -> int:
        """Return a launch argument in 8 bytes; one of 4 bytes is in the first four."""
        match argument:
            case (kind, buffer, offset) if kind == POINTER:
                return self.own[buffer] + offset
            case (kind, value) if kind in (INT32, FLOAT32):
                return value & 0xFFFFFFFF
            case (kind, distance, buffer, offset) if kind == PEER:
                return self.peers[distance - 1][buffer] + offset
            case (kind,) if kind == RANK:
                return self.rank
        return 0  # a null pointer


class PackedProgram:
    """Launches with their arguments in the driver's format, kept alive here."""

    def __init__(
        self, launches: Sequence[Launch], addresses: RankAddresses, kernels: KernelLibrary
    ) -> None:
        arguments = [argument for launch in launches for argument in launch.arguments]
        self._values = np.array([addresses.packed(a) for a in arguments], np.uint64)
        self._pointers = self._values.ctypes.data + 8 * np.arange(len(arguments), dtype=np.uint64)
        self.launches = tuple(self._configured(launches, kernels))

    def _configured(self, launches: Sequence[Launch], kernels: KernelLibrary) -> list[LaunchConfig]:
        configs, first = [], self._pointers.ctypes.data
        for launch in launches:
            configs.append(
                LaunchConfig(
                    function=kernels.function(launch.kernel, launch.shared_bytes, launch.block),
                    grid=launch.grid,
                    block=launch.block,
                    shared_bytes=launch.shared_bytes,
                    programmatic=launch.programmatic,
                    parameters=first,
                )
            )
            first += self._pointers.itemsize * len(launch.arguments)
        return configs


class ProgramRunner:
    """Runs a plan's programs in order on one stream, each as a CUDA graph recorded on first use.

    With ``recorded`` false, kernels are launched one by one, for debugging.
    """

    def __init__(
        self,
        gpu: Gpu,
        plan: Plan,
        addresses: RankAddresses,
        read_file: ReadFile,
        stream: Handle,
        *,
        recorded: bool = True,
    ) -> None:
        self.gpu = gpu
        self.stream = stream
        self._plan = plan
        self._places = addresses
        self._addresses = addresses.own
        self._read_file = read_file
        self._recorded = recorded
        self._recording = gpu.new_stream()
        self._kernels = KernelLibrary(gpu, plan.kernels, read_file)
        self._programs: dict[str, PackedProgram] = {}
        self._graphs: dict[str, Handle] = {}

    def prepare(self, entry: ProgramEntry) -> None:
        """Do everything that a first run would do, except run it."""
        if not self._recorded:
            self.program(entry)
        elif entry.name not in self._graphs:
            # The graph copies the arguments. Launches of many programs would be thousands of
            # objects, which every full garbage collection visits.
            packed = self._packed(entry)
            self._graphs[entry.name] = self.record(packed.launches)

    def start(self, entry: ProgramEntry) -> None:
        """Queue a program."""
        self.prepare(entry)
        if self._recorded:
            self.gpu.launch_graph(self._graphs[entry.name], self.stream)
            return
        for config in self.program(entry).launches:
            self.gpu.launch(config, self.stream)

    def program(self, entry: ProgramEntry) -> PackedProgram:
        """Return the launches of a program, read and checked on first use."""
        if entry.name not in self._programs:
            self._programs[entry.name] = self._packed(entry)
        return self._programs[entry.name]

    def _packed(self, entry: ProgramEntry) -> PackedProgram:
        launches = self.launches(entry)
        self._kernels.check_arguments(launches, entry.file)
        return PackedProgram(launches, self._places, self._kernels)

    def launches(self, entry: ProgramEntry) -> tuple[Launch, ...]:
        """Return a program's launches as in the plan."""
        return read_launches(self._read_file(entry.file), self._plan, entry)

    def described(self, entry: ProgramEntry) -> Program:
        """Return a program with the ops that its launches compute."""
        return read_program(self._read_file(entry.file), entry)

    def clear_scratch(self) -> None:
        """Queue zeros for scratch that ops leave zero only if all of their launches run."""
        for buffer, address in zip(self._plan.buffers, self._addresses, strict=True):
            if buffer.name == ZEROED and buffer.bytes:
                self.gpu.fill(address, 0, buffer.bytes // 4, self.stream)

    def kernel_name(self, index: int) -> str:
        """Return the plan's name of a kernel."""
        return self._plan.kernels[index].name

    def record(self, launches: Sequence[LaunchConfig]) -> Handle:
        """Return a graph of these launches."""
        self.gpu.begin_capture(self._recording)
        try:
            for config in launches:
                self.gpu.launch(config, self._recording)
        except SpecbuildError:
            # A stream that stays in recording would capture every later launch; the first error is
            # clearer.
            _quietly(self.gpu.end_capture, self._recording)
            raise
        return self.gpu.end_capture(self._recording)

    def close(self) -> None:
        """Release every graph."""
        for graph in self._graphs.values():
            self.gpu.release_graph(graph)
        self._graphs.clear()


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    try:
        call(*arguments)
    except SpecbuildError:
        return
