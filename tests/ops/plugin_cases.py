"""An op's case as the record of a TensorRT plugin, compiled for the emulator or for a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from emulation import Guarded, emulated_entry, guarded

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled
from specbuild.builder.backends.cuda.tuning.kernel_case import KernelCase
from specbuild.builder.backends.tensorrt.plugins.fields import PluginForm, PluginOp, plugin_record
from specbuild.plugins_cuda.launches import Kernel, Lowering, Phase, Target
from specbuild.runtime.engine_dir.plan import CompiledKernel
from specbuild.runtime.executors.cuda.gpu import LaunchConfig
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher
from specbuild.runtime.executors.tensorrt.plugin_record import (
    PluginRecord,
    read_fields,
    write_fields,
)


def plugin_of(drawn: KernelCase, phase: Phase, target: Target, *lowerings: Lowering) -> PluginOp:
    """The case as a node's op of one size."""
    form = PluginForm(drawn.request(phase, target).tensors, lowerings)
    return PluginOp(drawn.op, (form,))


@dataclass(frozen=True)
class EmulatedCubins:
    """Stands for compiled kernels: a cubin is the kernel's number."""

    kernels: tuple[Kernel, ...]

    def compiled(self) -> Compiled:
        files = {f"kernels/{i}.cubin": str(i).encode() for i in range(len(self.kernels))}
        entries = {
            kernel: CompiledKernel(f"{kernel.folder}/{kernel.file}", file, kernel.entry, 0, 0, 0)
            for kernel, file in zip(self.kernels, files, strict=True)
        }
        return Compiled(entries, files)


def carried(plugin: PluginOp) -> tuple[PluginRecord, EmulatedGpu, dict[str, bytes]]:
    """The record after it went through fields, and a GPU that knows its kernels."""
    known = EmulatedCubins(tuple(plugin.kernels))
    fields = write_fields(*plugin_record(plugin, known.compiled(), "sm_90a"))
    record, cubins = read_fields(fields)
    return record, EmulatedGpu(known.kernels), cubins


class EmulatedGpu:
    """What an OpLauncher asks of a GPU, by the emulator: launches run at once in host memory."""

    def __init__(self, kernels: tuple[Kernel, ...]) -> None:
        self._kernels = kernels
        self._shared: dict[Kernel, int] = {}

    def load_module(self, cubin: bytes, where: str) -> int:
        assert where == f"kernels/{cubin.decode()}.cubin"
        return int(cubin)

    def function(self, module: int, entry: str) -> Kernel:
        assert self._kernels[module].entry == entry
        return self._kernels[module]

    def set_shared(self, function: Kernel, shared_bytes: int, carveout: int) -> None:
        assert -1 <= carveout <= 100
        self._shared[function] = shared_bytes

    def fill(self, address: int, word: int, words: int, _stream: object) -> None:
        (ctypes.c_uint32 * words).from_address(address)[:] = [word] * words

    def launch(self, config: LaunchConfig, _stream: object) -> None:
        assert config.shared_bytes <= self._shared.get(config.function, 0)
        entry = emulated_entry(config.function)
        grid = (ctypes.c_uint * 3)(*config.grid)
        pointers = ctypes.c_void_p(config.parameters)
        assert entry(grid, ctypes.c_uint(config.block), pointers) == 0, "deadlock"


def run_plugin(
    drawn: KernelCase,
    plugin: PluginOp,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """The outputs by name of what ``enqueue`` queues, over poisoned outputs and scratch memory."""
    record, gpu, cubins = carried(plugin)
    aliased = dict(drawn.op.aliases)
    memory = {name: guarded(array) for name, array in inputs.items()}
    for name, array in outputs.items():
        memory[name] = memory[aliased[name]] if name in aliased else Guarded(array.nbytes)
    scratch = Guarded(record.workspace_bytes)
    scratch.data[:] = 0xFF
    launcher = OpLauncher(gpu, record, cubins)  # type: ignore[arg-type]
    shapes = [info.shape for info in plugin.forms[0].tensors.values()][: len(record.inputs)]
    assert record.buckets[0].inputs == tuple(shapes)
    addresses = [memory[tensor.name].address for tensor in record.tensors]
    launcher.enqueue(0, addresses, scratch.address, None)
    for name, place in (*memory.items(), ("scratch", scratch)):
        assert place.untouched(), f"{drawn.op.name}: a kernel wrote outside of {name}"
    return {
        name: memory[name].data.view(array.dtype).reshape(array.shape)
        for name, array in outputs.items()
    }
