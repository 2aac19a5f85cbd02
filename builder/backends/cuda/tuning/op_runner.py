"""Runs and times single ops on a GPU, for ``tune`` and the kernel tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Compiler, required
from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    OpLaunch,
    PeerPointer,
    RankNumber,
    Unsupported,
)
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cuda.shared_memory import shared_attributes, shared_carveout

Pointers = Mapping[str, int]
_POISON = 0xFF
_GUARD_BYTES = 256
# Larger inputs are weights and caches, whose download takes longer than their kernel.
_COMPARED_BYTES = 16 << 20


class OpRunner:
    """The first GPU with its primary context."""

    def __init__(self, compiler: Compiler) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._compiler = compiler
        self._functions: dict[Kernel, Any] = {}
        self._cubins: dict[Kernel, bytes] = {}
        self._registers: dict[Kernel, int] = {}
        self._call(driver.cuInit, 0)
        device = self._call(driver.cuDeviceGet, 0)
        self.context = self._call(driver.cuDevicePrimaryCtxRetain, device)
        self._call(driver.cuCtxSetCurrent, self.context)
        self.stream = self._call(driver.cuStreamCreate, 1)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors = int(self._call(driver.cuDeviceGetAttribute, attribute, device))
        name = bytes(self._call(driver.cuDeviceGetName, 128, device))
        self.device_name = name.partition(b"\0")[0].decode()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise UnsupportedHereError(f"{function.__name__} failed: {status.name}")
        return results[0] if results else None

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory and fill it with poison bytes."""
        pointer = self._call(self._driver.cuMemAlloc, max(nbytes, 16))
        self._call(self._driver.cuMemsetD8, pointer, _POISON, max(nbytes, 16))
        return int(pointer)

    def free(self, pointer: int) -> None:
        """Free memory."""
        self._call(self._driver.cuMemFree, pointer)

    def upload(self, pointer: int, array: np.ndarray) -> None:
        """Copy an array to the device."""
        data = np.ascontiguousarray(array)
        if data.nbytes:
            self._call(self._driver.cuMemcpyHtoD, pointer, data.ctypes.data, data.nbytes)

    def download(self, pointer: int, array: np.ndarray) -> np.ndarray:
        """Copy bytes of the device to a new array with the shape and dtype of ``array``."""
        out = np.empty_like(array)
        if out.nbytes:
            self._call(self._driver.cuMemcpyDtoH, out.ctypes.data, pointer, out.nbytes)
        return out

    def synchronize(self) -> None:
        """Wait for all copies and launches of all streams."""
        self._call(self._driver.cuCtxSynchronize)

    def compiled(self, kernels: Sequence[Kernel]) -> Compiled:
        """Compile these kernels, each once, and return their machine code."""
        return required(self._compiler.compile(kernels, lambda: None))

    def refusal(self, lowering: Lowering) -> Unsupported | None:
        """Compile a lowering and return why it must not be launched, or None if it can be."""
        kernels = [launch.kernel for launch in lowering.launches]
        compiled = self._compiler.compile(kernels, lambda: None)
        return compiled if isinstance(compiled, Unsupported) else None

    def prepare(self, lowerings: Sequence[Lowering]) -> None:
        """Compile the kernels of these lowerings in parallel."""
        kernels = [launch.kernel for lowering in lowerings for launch in lowering.launches]
        missing = [kernel for kernel in kernels if kernel not in self._cubins]
        compiled = self.compiled(missing)
        for kernel, entry in compiled.kernels.items():
            self._cubins[kernel] = compiled.files[entry.cubin]
            self._registers[kernel] = entry.registers

    def run(
        self,
        op: OpSpec,
        lowering: Lowering,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
        *,
        queue: Callable[[Pointers], None] | None = None,
        resident: Pointers | None = None,
    ) -> dict[str, np.ndarray]:
        """Run an op and return its outputs by name. They are poisoned before, with guards around.

        Inputs of :meth:`resident` are not uploaded again. ``queue`` replaces :meth:`launch` and
        waits for the launches. Raises AssertionError if a kernel wrote outside of an array, or did
        not clear a workspace that must stay zero.
        """
        self.prepare([lowering])
        aliased = dict(op.aliases)
        sizes = {name: array.nbytes for name, array in inputs.items()}
        sizes |= {name: a.nbytes for name, a in outputs.items() if name not in aliased}
        sizes |= {w.name: w.nbytes for w in lowering.workspaces}
        kept = resident or {}
        blocks = {name: kept.get(name) or self._guarded(size) for name, size in sizes.items()}
        pointers = {name: block + _GUARD_BYTES for name, block in blocks.items()}
        pointers |= {name: pointers[aliased[name]] for name in outputs if name in aliased}
        try:
            for name, array in inputs.items():
                if name not in kept:
                    self.upload(pointers[name], array)
            for workspace in lowering.workspaces:
                if workspace.zeroed and workspace.nbytes:
                    self._call(
                        self._driver.cuMemsetD8, pointers[workspace.name], 0, workspace.nbytes
                    )
            self._call(self._driver.cuCtxSynchronize)
            if queue is None:
                self.launch(lowering, pointers)
            else:
                queue(pointers)
            self._call(self._driver.cuStreamSynchronize, self.stream)
            self._check_guards(op.name, sizes, blocks)
            for workspace in lowering.workspaces:
                if workspace.zeroed:
                    content = self.download(
                        pointers[workspace.name], np.empty(workspace.nbytes, np.uint8)
                    )
                    assert not content.any(), f"{op.name}: {workspace.name} is not zero after it"
            return {name: self.download(pointers[name], array) for name, array in outputs.items()}
        finally:
            for name, block in blocks.items():
                if name not in kept:
                    self.free(block)

    @contextmanager
    def resident(self, op: OpSpec, inputs: Mapping[str, np.ndarray]) -> Iterator[Pointers]:
        """Upload the inputs that the op does not write, for several calls of :meth:`run`.

        Raises AssertionError at the end if a kernel wrote to one, but for the largest ones. Ops
        that exchange data between ranks write to inputs that are no aliases: none is uploaded.
        """
        written = {name for _, name in op.aliases}
        exchanges = op.contribution is not None
        read = {n: array for n, array in inputs.items() if not exchanges and n not in written}
        blocks: dict[str, int] = {}
        try:
            for name, array in read.items():
                blocks[name] = self._guarded(array.nbytes)
                self.upload(blocks[name] + _GUARD_BYTES, array)
            yield blocks
            for name, array in read.items():
                if array.nbytes <= _COMPARED_BYTES:
                    after = self.download(blocks[name] + _GUARD_BYTES, array)
                    same = after.tobytes() == np.ascontiguousarray(array).tobytes()
                    assert same, f"{op.name}: a kernel wrote to {name}"
        finally:
            for block in blocks.values():
                self.free(block)

    def _guarded(self, nbytes: int) -> int:
        return self.allocate(nbytes + 3 * _GUARD_BYTES)

    def _check_guards(self, op: str, sizes: Mapping[str, int], blocks: Pointers) -> None:
        for name, size in sizes.items():
            guard = np.empty(_GUARD_BYTES, np.uint8)
            before = self.download(blocks[name], guard)
            after = self.download(blocks[name] + _GUARD_BYTES + size, guard)
            intact = (before == _POISON).all() and (after == _POISON).all()
            assert intact, f"{op}: a kernel wrote outside of {name}"

    def launch(self, lowering: Lowering, pointers: Pointers, *, programmatic: bool = True) -> None:
        """Queue every launch; a name without a pointer is an absent tensor.

        A launch that reads inputs early can follow any other launch, because none writes inputs.
        """
        for launch in lowering.launches:
            self._launch(launch, pointers, programmatic=programmatic and launch.programmatic)

    def time_s(
        self,
        work: Sequence[tuple[Lowering, Pointers]],
        *,
        programmatic: bool = True,
        replays: int = 20,
    ) -> float:
        """Return the median seconds of all of ``work``, in order, as one CUDA graph."""
        driver = self._driver
        self.prepare([lowering for lowering, _ in work])
        for lowering, pointers in work[:1]:
            self.launch(lowering, pointers, programmatic=False)
        self._call(driver.cuStreamSynchronize, self.stream)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call(driver.cuStreamBeginCapture, self.stream, mode)
        for lowering, pointers in work:
            self.launch(lowering, pointers, programmatic=programmatic)
        graph = self._call(driver.cuStreamEndCapture, self.stream)
        executable = self._call(driver.cuGraphInstantiate, graph, 0)
        begin, end = (self._call(driver.cuEventCreate, 0) for _ in range(2))
        times = []
        for _ in range(replays + 2):
            self._call(driver.cuEventRecord, begin, self.stream)
            self._call(driver.cuGraphLaunch, executable, self.stream)
            self._call(driver.cuEventRecord, end, self.stream)
            self._call(driver.cuEventSynchronize, end)
            times.append(self._call(driver.cuEventElapsedTime, begin, end) * 1e-3)
        self._call(driver.cuGraphExecDestroy, executable)
        self._call(driver.cuGraphDestroy, graph)
        return float(np.median(times[2:]))

    def _function(self, launch: OpLaunch) -> Any:
        driver, kernel = self._driver, launch.kernel
        if kernel not in self._functions:
            module = self._call(driver.cuModuleLoadData, self._cubins[kernel])
            self._functions[kernel] = self._call(
                driver.cuModuleGetFunction, module, kernel.entry.encode()
            )
        function = self._functions[kernel]
        carveout = shared_carveout(launch.shared_bytes, self._registers[kernel], launch.block)
        for kind, value in shared_attributes(driver, launch.shared_bytes, carveout):
            self._call(driver.cuFuncSetAttribute, function, kind, value)
        return function

    def _launch(self, launch: OpLaunch, pointers: Pointers, *, programmatic: bool) -> None:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = self.stream
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values: list[int | float] = []
        types: list[type[Any]] = []
        for argument in launch.arguments:
            value, kind = _argument_value(argument, pointers)
            values.append(value)
            types.append(kind)
        function = self._function(launch)
        self._call(driver.cuLaunchKernelEx, config, function, (tuple(values), tuple(types)), 0)


def _argument_value(argument: Argument, pointers: Pointers) -> tuple[int | float, type[Any]]:
    """Return the value and type of a launch argument.

    On a single GPU this is rank 0, and pointers to other ranks refer to its own memory.
    """
    if isinstance(argument, PeerPointer):
        argument = argument.name
    if argument is None or isinstance(argument, str):
        return 0 if argument is None else pointers.get(argument, 0), ctypes.c_void_p
    if isinstance(argument, RankNumber):
        return 0, ctypes.c_int32
    return argument, ctypes.c_float if isinstance(argument, float) else ctypes.c_int32
