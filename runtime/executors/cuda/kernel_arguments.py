"""Checks that launches pass the arguments that their kernels take, from the cubins' own tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbuild.runtime.engine_dir.plan import FLOAT32, INT32, RANK, CompiledKernel, Launch
from specbuild.runtime.errors import OutdatedEngineError
from specbuild.runtime.executors.cuda.cubin import PARAMETER_BYTES, Signatures, kernel_parameters

ReadFile = Callable[[str], bytes]
_WORDS = (INT32, FLOAT32, RANK)


def argument_bytes(arguments: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the bytes of a launch's arguments, as a kernel's parameters have them."""
    word, pointer = PARAMETER_BYTES
    return tuple([word if argument[0] in _WORDS else pointer for argument in arguments])


class KernelArguments:
    """The parameters of kernels; a cubin is read at the first launch of one of its kernels."""

    def __init__(self, kernels: Sequence[CompiledKernel], read_file: ReadFile) -> None:
        self._kernels = kernels
        self._read_file = read_file
        self._signatures: dict[str, Signatures] = {}

    def check(self, launches: Sequence[Launch], where: str) -> None:
        """Raise EngineFileError if a launch passes other arguments than its kernel takes."""
        for i, launch in enumerate(launches):
            kernel = self._kernels[launch.kernel]
            parameters = self._parameters(kernel)
            passed = argument_bytes(launch.arguments)
            if passed != parameters:
                raise OutdatedEngineError(
                    f"{where}: launch {i} passes arguments of {passed} bytes, {kernel.name} takes "
                    f"{parameters}"
                )

    def _parameters(self, kernel: CompiledKernel) -> tuple[int, ...] | None:
        if kernel.cubin not in self._signatures:
            cubin = self._read_file(kernel.cubin)
            self._signatures[kernel.cubin] = kernel_parameters(cubin, kernel.cubin)
        return self._signatures[kernel.cubin].get(kernel.entry)
