"""Compiles kernels to cubins with NVRTC, which needs neither a GPU nor a driver."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specbuild.builder.backends.cuda.compile.source import KernelSource, source_of
from specbuild.builder.backends.cuda.gpus import MULTIPROCESSORS, require_supported
from specbuild.plugins_cuda.launches import Kernel, Target, Unsupported
from specbuild.runtime.engine_dir.plan import CompiledKernel
from specbuild.runtime.errors import SpecbuildError

KERNEL_FOLDER = "kernels"
# Older versions reject generic lambdas in device code, or spill registers in some kernels.
MIN_NVRTC = (13, 2)
_REMEDY = f"pip install 'nvidia-cuda-nvrtc>={MIN_NVRTC[0]}.{MIN_NVRTC[1]}' cuda-bindings"
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Spills(Unsupported):
    """Hot ``kernels`` that spill registers. An engine must not launch them."""

    kernels: frozenset[Kernel]


@dataclass(frozen=True)
class Resources:
    """The resources of one entry; ``spill_bytes`` is the sum of stores and loads."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Compiled machine code, its file in an engine, and its entries."""

    file: str
    data: bytes
    entries: Mapping[str, Resources]


@dataclass(frozen=True)
class Compiled:
    """Every kernel of an engine, and the cubin files that contain them."""

    kernels: Mapping[Kernel, CompiledKernel]
    files: Mapping[str, bytes]


def required(result: Compiled | Unsupported) -> Compiled:
    """Return the machine code. SpecbuildError if a source does not compile or hot kernels spill."""
    if isinstance(result, Unsupported):
        raise SpecbuildError(result.reason)
    return result


def target_of(gpu: str) -> Target:
    """Return the GPU for which programs are lowered."""
    return Target(arch=gpu, multiprocessors=MULTIPROCESSORS[gpu])


class Compiler:
    """NVRTC for one architecture. Each source is compiled once for all its kernels."""

    def __init__(self, gpu: str) -> None:
        require_supported(gpu)
        self.gpu = gpu
        self._cubins: dict[KernelSource, Cubin] = {}

    @property
    def driver_version(self) -> int:
        """The minimum CUDA version of the driver. Cubins run on any minor version."""
        return self._nvrtc_version[0] * 1000

    @property
    def version(self) -> str:
        """NVRTC's version, such as 13.5. Raises SpecbuildError if it is missing or too old."""
        return ".".join(map(str, self._nvrtc_version))

    def adopt(
        self,
        kernels: Iterable[Kernel],
        known: Iterable[CompiledKernel],
        read: Callable[[str], bytes],
    ) -> None:
        """Reuse the cubins of an engine whose sources have the same digests.

        ``known`` are the engine's kernels. ``read`` returns the contents of its files.
        """
        stored: dict[str, dict[str, Resources]] = {}
        for entry in known:
            resources = Resources(entry.registers, entry.spill_bytes, entry.shared_bytes)
            stored.setdefault(entry.cubin, {})[entry.entry] = resources
        required_entries: dict[KernelSource, set[str]] = {}
        for kernel in kernels:
            required_entries.setdefault(source_of(kernel), set()).add(kernel.entry)
        for source, entries in required_entries.items():
            file = self._file(source)
            if source not in self._cubins and entries <= set(stored.get(file, ())):
                self._cubins[source] = Cubin(file, read(file), stored[file])

    def missing(self, kernels: Iterable[Kernel]) -> tuple[KernelSource, ...]:
        """Return the sources that :meth:`compile` would compile, in the order of first use."""
        sources = (source_of(kernel) for kernel in kernels if not self._is_compiled(kernel))
        return tuple(dict.fromkeys(sources))

    def _is_compiled(self, kernel: Kernel) -> bool:
        cubin = self._cubins.get(source_of(kernel))
        return cubin is not None and kernel.entry in cubin.entries

    def compile(
        self, kernels: Iterable[Kernel], done: Callable[[], None]
    ) -> Compiled | Unsupported:
        """Return machine code for all kernels, in order; call ``done`` for each compiled source.

        Returns the first source that does not compile, or :class:`Spills`. Raises SpecbuildError if
        the compiler is missing.
        """
        kernels = tuple(dict.fromkeys(kernels))
        missing = self.missing(kernels)
        failed: Unsupported | None = None
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for source, cubin in zip(missing, pool.map(self._cubin, missing), strict=True):
                if isinstance(cubin, Unsupported):
                    failed = failed or cubin
                else:
                    self._cubins[source] = cubin
                done()
        if failed is not None:
            return failed
        compiled = {kernel: self._entry(kernel) for kernel in kernels}
        spills = _spills(compiled)
        if spills is not None:
            return spills
        used = dict.fromkeys(source_of(kernel) for kernel in kernels)
        files = {self._cubins[source].file: self._cubins[source].data for source in used}
        return Compiled(compiled, dict(sorted(files.items())))

    def _entry(self, kernel: Kernel) -> CompiledKernel:
        source = source_of(kernel)
        cubin = self._cubins[source]
        if kernel.entry not in cubin.entries:
            raise AssertionError(f"{source.name} has no entry {kernel.entry!r}")
        resources = cubin.entries[kernel.entry]
        return CompiledKernel(
            name=f"{source.name}:{kernel.entry}",
            cubin=cubin.file,
            entry=kernel.entry,
            registers=resources.registers,
            spill_bytes=resources.spill_bytes,
            shared_bytes=resources.shared_bytes,
        )

    def _cubin(self, source: KernelSource) -> Cubin | Unsupported:
        options = self._options(source)
        result = _compiled(self._nvrtc, source, options)
        if isinstance(result, Unsupported):
            return result
        data, log = result
        return Cubin(self._file(source), data, read_log(log))

    def _file(self, source: KernelSource) -> str:
        digest = source.digest((self.gpu, self.version, *self._common))
        return f"{KERNEL_FOLDER}/{digest}.cubin"

    @property
    def _common(self) -> tuple[str, ...]:
        # A compilation that hits the cache has no log to read registers from.
        verbose = ("--ptxas-options=-v", "--no-cache")
        # Results must not depend on the variant of a kernel, but the compiler would contract
        # products and sums differently in each. Kernels call fmaf where they need a contraction.
        exact = ("--fmad=false",)
        return (f"--gpu-architecture={self.gpu}", "--std=c++17", *exact, *verbose)

    def _options(self, source: KernelSource) -> tuple[str, ...]:
        return (*self._common, *source.definitions(), f"-I{source.path.parent}")

    @cached_property
    def _nvrtc(self) -> Any:
        try:
            from cuda.bindings import nvrtc

            _, *version = nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError) as error:
            raise SpecbuildError(
                f"compiling for CUDA needs NVRTC, which is not installed ({error}); {_REMEDY}"
            ) from error
        if tuple(version) < MIN_NVRTC:
            raise SpecbuildError(
                "compiling for CUDA needs NVRTC {}.{} or later, got {}.{}; {}".format(
                    *MIN_NVRTC, *version, _REMEDY
                )
            )
        return nvrtc

    @cached_property
    def _nvrtc_version(self) -> tuple[int, int]:
        _, major, minor = self._nvrtc.nvrtcVersion()
        return major, minor


def read_log(log: str) -> dict[str, Resources]:
    """Return the resources of every entry from the assembler's log."""
    resources = {}
    parts = _ENTRY.split(log)
    for entry, text in zip(parts[1::2], parts[2::2], strict=True):
        spills, registers, shared = (p.search(text) for p in (_SPILLS, _REGISTERS, _SHARED))
        assert registers is not None, text
        resources[entry] = Resources(
            registers=int(registers[1]),
            spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return resources


def _spills(compiled: Mapping[Kernel, CompiledKernel]) -> Spills | None:
    spilling = {
        kernel: f"{result.name} "
        f"({', '.join(f'{name}={value}' for name, value in kernel.constants)}) "
        f"{result.spill_bytes} bytes"
        for kernel, result in compiled.items()
        if kernel.hot and result.spill_bytes
    }
    if not spilling:
        return None
    return Spills(
        f"hot kernels must not spill registers, but these do: {'; '.join(spilling.values())}; "
        "use another tactic or smaller tiles",
        frozenset(spilling),
    )


def _compiled(
    nvrtc: Any, source: KernelSource, options: tuple[str, ...]
) -> tuple[bytes, str] | Unsupported:
    """Return the cubin and the assembler's log, or the compiler's first error."""
    text = source.path.read_bytes()
    # Pass the name instead of the path, so that the cubin contains no local paths.
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, source.name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        # The library writes into this buffer. It is longer than one byte because Python shares
        # bytes objects of length 1.
        log = b" " * (1 + _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        message = log.decode(errors="replace").rstrip("\0 ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            first = next((line for line in message.splitlines() if "error" in line), str(status))
            return Unsupported(
                f"kernel source {source.name} does not compile with {' '.join(options)}: {first}"
            )
        data = b" " * _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        nvrtc.nvrtcGetCUBIN(program, data)
        return data, message
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise SpecbuildError(f"NVRTC failed with {status}; {_REMEDY}")
    return values[0]
