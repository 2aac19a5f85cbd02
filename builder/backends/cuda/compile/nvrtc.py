"""Compiles kernels to cubins with NVRTC: no GPU and no driver are needed."""

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
# Older ones refuse generic lambdas in device code, or spill registers of some kernels.
MIN_NVRTC = (13, 2)
_REMEDY = f"pip install 'nvidia-cuda-nvrtc>={MIN_NVRTC[0]}.{MIN_NVRTC[1]}' cuda-bindings"
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Spills(Unsupported):
    """Hot kernels spill registers, which no engine may launch; ``kernels`` are these."""

    kernels: frozenset[Kernel]


@dataclass(frozen=True)
class Resources:
    """What one entry takes; ``spill_bytes`` are stores and loads together."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Compiled machine code, where it stands in an engine, and its entries."""

    file: str
    data: bytes
    entries: Mapping[str, Resources]


@dataclass(frozen=True)
class Compiled:
    """Every kernel of an engine, and the cubin files that hold them."""

    kernels: Mapping[Kernel, CompiledKernel]
    files: Mapping[str, bytes]


def required(found: Compiled | Unsupported) -> Compiled:
    """The machine code. Raises SpecbuildError where a source gives none, or hot kernels spill."""
    if isinstance(found, Unsupported):
        raise SpecbuildError(found.reason)
    return found


def target_of(gpu: str) -> Target:
    """The GPU that programs are lowered for."""
    return Target(arch=gpu, multiprocessors=MULTIPROCESSORS[gpu])


class Compiler:
    """NVRTC for one architecture; a source is compiled once, however many kernels name it."""

    def __init__(self, gpu: str) -> None:
        require_supported(gpu)
        self.gpu = gpu
        self._cubins: dict[KernelSource, Cubin] = {}

    @property
    def driver_version(self) -> int:
        """The least CUDA version that a driver needs: cubins run on any of the same major one."""
        return self._nvrtc_version[0] * 1000

    @property
    def version(self) -> str:
        """NVRTC's own, such as 13.5. Raises SpecbuildError where it is missing or too old."""
        return ".".join(map(str, self._nvrtc_version))

    def adopt(
        self,
        kernels: Iterable[Kernel],
        known: Iterable[CompiledKernel],
        read: Callable[[str], bytes],
    ) -> None:
        """Takes cubins from an engine instead of compiling: those of the same digest.

        ``known`` are the engine's kernels, ``read`` gives a file of it.
        """
        held: dict[str, dict[str, Resources]] = {}
        for entry in known:
            took = Resources(entry.registers, entry.spill_bytes, entry.shared_bytes)
            held.setdefault(entry.cubin, {})[entry.entry] = took
        wanted: dict[KernelSource, set[str]] = {}
        for kernel in kernels:
            wanted.setdefault(source_of(kernel), set()).add(kernel.entry)
        for source, entries in wanted.items():
            file = self._file(source)
            if source not in self._cubins and entries <= set(held.get(file, ())):
                self._cubins[source] = Cubin(file, read(file), held[file])

    def missing(self, kernels: Iterable[Kernel]) -> tuple[KernelSource, ...]:
        """The sources that :meth:`compile` would have to compile, in the order of first use."""
        unknown = (source_of(kernel) for kernel in kernels if not self._holds(kernel))
        return tuple(dict.fromkeys(unknown))

    def _holds(self, kernel: Kernel) -> bool:
        cubin = self._cubins.get(source_of(kernel))
        return cubin is not None and kernel.entry in cubin.entries

    def compile(
        self, kernels: Iterable[Kernel], done: Callable[[], None]
    ) -> Compiled | Unsupported:
        """Machine code for every kernel, in the given order; ``done`` is called per source.

        Or the first source that does not compile; or :class:`Spills`. Raises SpecbuildError where
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
        took = cubin.entries[kernel.entry]
        return CompiledKernel(
            name=f"{source.name}:{kernel.entry}",
            cubin=cubin.file,
            entry=kernel.entry,
            registers=took.registers,
            spill_bytes=took.spill_bytes,
            shared_bytes=took.shared_bytes,
        )

    def _cubin(self, source: KernelSource) -> Cubin | Unsupported:
        options = self._options(source)
        found = _compiled(self._nvrtc, source, options)
        if isinstance(found, Unsupported):
            return found
        data, log = found
        return Cubin(self._file(source), data, read_log(log))

    def _file(self, source: KernelSource) -> str:
        digest = source.digest((self.gpu, self.version, *self._common))
        return f"{KERNEL_FOLDER}/{digest}.cubin"

    @property
    def _common(self) -> tuple[str, ...]:
        # A compilation that is found in a cache leaves no log to read registers from.
        verbose = ("--ptxas-options=-v", "--no-cache")
        # Which products and sums become one operation is the compiler's choice, made anew for every
        # variant of a kernel; results must not depend on the variant. Kernels ask for it by fmaf.
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
                f"compiling for CUDA needs NVRTC, which is not here ({error}); {_REMEDY}"
            ) from error
        if tuple(version) < MIN_NVRTC:
            raise SpecbuildError(
                "compiling for CUDA needs NVRTC {}.{} or later, this is {}.{}; {}".format(
                    *MIN_NVRTC, *version, _REMEDY
                )
            )
        return nvrtc

    @cached_property
    def _nvrtc_version(self) -> tuple[int, int]:
        _, major, minor = self._nvrtc.nvrtcVersion()
        return major, minor


def read_log(log: str) -> dict[str, Resources]:
    """What the assembler says of every entry, by name."""
    found = {}
    parts = _ENTRY.split(log)
    for entry, text in zip(parts[1::2], parts[2::2], strict=True):
        spills, registers, shared = (p.search(text) for p in (_SPILLS, _REGISTERS, _SHARED))
        assert registers is not None, text
        found[entry] = Resources(
            registers=int(registers[1]),
            spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return found


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
        f"hot kernels must not spill registers, these do: {'; '.join(spilling.values())}; "
        "use another tactic or smaller tiles",
        frozenset(spilling),
    )


def _compiled(
    nvrtc: Any, source: KernelSource, options: tuple[str, ...]
) -> tuple[bytes, str] | Unsupported:
    """The cubin and the assembler's log, or the compiler's first error."""
    text = source.path.read_bytes()
    # The name, not the path: nothing of this machine may end up in a cubin.
    program = _done(nvrtc, nvrtc.nvrtcCreateProgram(text, source.name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        # Never of one byte: the library writes into it, and Python shares those among all.
        log = b" " * (1 + _done(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        message = log.decode(errors="replace").rstrip("\0 ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            first = next((line for line in message.splitlines() if "error" in line), str(status))
            return Unsupported(
                f"kernel source {source.name} does not compile with {' '.join(options)}: {first}"
            )
        data = b" " * _done(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        nvrtc.nvrtcGetCUBIN(program, data)
        return data, message
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _done(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise SpecbuildError(f"NVRTC failed with {status}; {_REMEDY}")
    return values[0]
