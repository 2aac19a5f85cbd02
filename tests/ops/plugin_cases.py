"""An op's case as the record of a TensorRT plugin, compiled for the emulator or a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from emulated_cubins import emulated_cubins, kernel_number
from emulation import Guarded, emulated_entry, guarded

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    KernelCase,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.builder.backends.tensorrt.plugins.fields import PluginForm, PluginOp, plugin_record
from specbuild.plugins_cuda.launches import Kernel, Lowering, Phase, Target
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import LaunchConfig
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher
from specbuild.runtime.executors.tensorrt.plugin_record import (
    read_fields,
    write_fields,
)


def plugin_of(drawn: KernelCase, phase: Phase, target: Target, *lowerings: Lowering) -> PluginOp:
    """Return the case as a node's op of one size."""
    form = PluginForm(drawn.request(phase, target).tensors, lowerings)
    return PluginOp(drawn.op, (form,))


def emulated_fields(plugin: PluginOp) -> dict[str, bytes]:
    """Return the plugin's fields, with kernels compiled for the emulator."""
    compiled = emulated_cubins(plugin.kernels, [plugin])
    return write_fields(*plugin_record(plugin, compiled, "sm_90a"))


def plugin_ops() -> list[OpSpec]:
    """Return every op that a plugin can run. An engine of TensorRT has one rank."""
    return [op for op in kernel_ops() if op.contribution is None]


def every_case(op: OpSpec) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Return the fields of a plugin for each case that the kernels support."""
    for phase in phases_of(op):
        for case in cases_for(op, phase, gpu=False):
            drawn = kernel_case(op, case)
            try:
                lowering = drawn.lowering(phase, SMALL_TARGET)
            except SpecbuildError:
                continue
            plugin = plugin_of(drawn, phase, SMALL_TARGET, lowering)
            yield case.name, emulated_fields(plugin)


class EmulatedGpu:
    """The GPU interface of an OpLauncher in the emulator: launches run at once on the host."""

    def __init__(self, kernels: tuple[Kernel, ...]) -> None:
        self._kernels = kernels
        self._shared: dict[Kernel, int] = {}

    def load_module(self, _cubin: bytes, where: str) -> int:
        return kernel_number(where)

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


Enqueue = Callable[[EmulatedGpu, dict[str, bytes], Sequence[int], int], None]


def launch_alone(
    gpu: EmulatedGpu, fields: dict[str, bytes], addresses: Sequence[int], scratch: int
) -> None:
    """Queue the launches without TensorRT."""
    launcher = OpLauncher(gpu, *read_fields(fields))
    launcher.enqueue(0, addresses, scratch, None)


def run_plugin(
    drawn: KernelCase,
    plugin: PluginOp,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    enqueue: Enqueue = launch_alone,
) -> dict[str, np.ndarray]:
    """Return the outputs of ``enqueue`` by name.

    Outputs and scratch memory are poisoned first.
    """
    fields = emulated_fields(plugin)
    record, _ = read_fields(fields)
    gpu = EmulatedGpu(tuple(plugin.kernels))
    aliased = dict(drawn.op.aliases)
    memory = {name: guarded(array) for name, array in inputs.items()}
    for name, array in outputs.items():
        memory[name] = memory[aliased[name]] if name in aliased else Guarded(array.nbytes)
    scratch = Guarded(record.workspace_bytes)
    scratch.data[:] = 0xFF
    shapes = [info.shape for info in plugin.forms[0].tensors.values()][: len(record.inputs)]
    assert record.buckets[0].inputs == tuple(shapes)
    addresses = [memory[tensor.name].address for tensor in record.tensors]
    enqueue(gpu, fields, addresses, scratch.address)
    for name, place in (*memory.items(), ("scratch", scratch)):
        assert place.untouched(), f"{drawn.op.name}: a kernel wrote outside of {name}"
    return {
        name: memory[name].data.view(array.dtype).reshape(array.shape)
        for name, array in outputs.items()
    }
