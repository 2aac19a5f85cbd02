"""Run the CUDA kernels of an op on the CPU: compiled by g++, each thread as a fiber.

The emulator checks indexing, masks, reductions, barriers, ring protocols, and every byte written.
It cannot show races between warps, memory ordering, or speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from content_store import content_store, digest

from specbuild.builder.backends.cuda.compile.source import source_of
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    OpLaunch,
    PeerPointer,
    RankNumber,
    TensorInfo,
)
from specbuild.plugins_cuda.opspec import OpSpec

EMULATED = Path(__file__).parent / "emulated"
GUARD_BYTES = 256
POISON = 0xFF
COMMON_FLAGS = (
    # Without -fno-gnu-unique all libraries share the statics of an inline function.
    "-std=c++20", "-w", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off", "-DSPECBUILD_EMULATE",
)  # fmt: skip
EMULATOR_FLAGS = ("-O2", "-shared")
# A kernel runs for a few milliseconds, less than its compilation. No kernel throws.
KERNEL_FLAGS = ("-Og", "-fno-exceptions", "-fno-asynchronous-unwind-tables")
# emulation::shared of emulated/emulator.cpp.
SHARED_SYMBOL, SHARED_BYTES = "_ZN9emulation6sharedE", 256 << 10

Arrays = Mapping[str, np.ndarray]
# The emulators of this process, by the name that kernels find them by.
_LOADED: dict[str, ctypes.CDLL] = {}
# Every kernel that this process has launched since the set was last cleared.
LAUNCHED: set[Kernel] = set()


def has_compiler() -> bool:
    """Return whether kernels can be emulated here."""
    return shutil.which("g++") is not None


def tensor_info(array: np.ndarray) -> TensorInfo:
    """Return the tensor description of an array for a lowering; uint16 arrays are bf16."""
    return TensorInfo(array.shape, {"uint16": "bfloat16"}.get(array.dtype.name, array.dtype.name))


class Guarded:
    """Bytes for a kernel, aligned to 256, with poisoned bytes around them."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.full(nbytes + 3 * GUARD_BYTES, POISON, np.uint8)
        self._start = GUARD_BYTES + -(self._memory.ctypes.data + GUARD_BYTES) % GUARD_BYTES
        self.data = self._memory[self._start : self._start + nbytes]

    @property
    def address(self) -> int:
        """The address of the bytes."""
        return self._memory.ctypes.data + self._start

    def untouched(self) -> bool:
        """Return whether no byte outside was written."""
        before, after = self._memory[: self._start], self._memory[self._start + len(self.data) :]
        return bool((before == POISON).all() and (after == POISON).all())


def guarded(array: np.ndarray) -> Guarded:
    """Return a copy of an array."""
    memory = Guarded(array.nbytes)
    memory.data[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memory


def run_lowering(
    op: OpSpec, lowering: Lowering, inputs: Arrays, outputs: Arrays
) -> dict[str, np.ndarray]:
    """Return the outputs by name after all launches ran in order.

    ``inputs`` has the inputs that are present, bf16 as uint16. ``outputs`` gives shape and type of
    each output; they are poisoned first. AssertionError if a kernel wrote outside an array, changed
    an input that no output aliases, or did not restore a zeroed workspace.
    """
    aliased = dict(op.aliases)
    memory = {name: guarded(array) for name, array in inputs.items()}
    for name, array in outputs.items():
        memory[name] = memory[aliased[name]] if name in aliased else Guarded(array.nbytes)
    for workspace in lowering.workspaces:
        memory[workspace.name] = Guarded(workspace.nbytes)
        if workspace.zeroed:
            memory[workspace.name].data[:] = 0
    counts = any(workspace.zeroed for workspace in lowering.workspaces)
    with interleaved() if counts else nullcontext():
        for launch in lowering.launches:
            emulate(launch, memory)
    for name, place in memory.items():
        assert place.untouched(), f"{op.name}: a kernel wrote outside of {name}"
    arguments = [argument for launch in lowering.launches for argument in launch.arguments]
    inboxes = {argument.name for argument in arguments if isinstance(argument, PeerPointer)}
    for name, array in inputs.items():
        if name not in (*aliased.values(), *inboxes):
            same = memory[name].data == np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            assert same.all(), f"{op.name}: a kernel changed its input {name}"
    for workspace in lowering.workspaces:
        left = memory[workspace.name].data
        assert not workspace.zeroed or not left.any(), f"{workspace.name} was not left zero"
    return {
        name: memory[name].data.view(array.dtype).reshape(array.shape)
        for name, array in outputs.items()
    }


@contextmanager
def interleaved() -> Iterator[None]:
    """Run blocks in an order that alternates between sequences."""
    emulator = emulator_library()
    emulator.emulation_interleave(1)
    try:
        yield
    finally:
        emulator.emulation_interleave(0)


def emulate(launch: OpLaunch, memory: Mapping[str, Guarded]) -> None:
    """Run one launch. A name without memory is an absent tensor (a null pointer)."""
    assert launch.shared_bytes <= 227 * 1024, launch
    assert launch.block <= 1024, launch
    holders = held_arguments(launch, [memory])
    pointers = (ctypes.c_void_p * len(holders))(*[ctypes.addressof(h) for h in holders])
    grid = (ctypes.c_uint * 3)(*launch.grid)
    entry = emulated_entry(launch.kernel)
    name = f"{launch.kernel.folder}.{launch.kernel.entry}"
    if launch.programmatic and launch.kernel not in _HELD_BACK:
        _HELD_BACK.add(launch.kernel)
        _hold_back(name, lambda: entry(grid, ctypes.c_uint(launch.block), pointers), memory)
    assert entry(grid, ctypes.c_uint(launch.block), pointers) == 0, f"{name}: deadlock"
    behind = _shared_memory()[launch.shared_bytes :]
    assert (behind == POISON).all(), f"{name} wrote behind its {launch.shared_bytes} shared bytes"


def held_arguments(
    launch: OpLaunch, memories: Sequence[Mapping[str, Guarded]], rank: int = 0
) -> list[Any]:
    """Return a launch's arguments for a kernel of this rank. ``memories`` has all ranks'.

    A single rank is its own peer.
    """
    holders: list[Any] = []
    for argument in launch.arguments:
        if argument is None or isinstance(argument, str | PeerPointer):
            peer = isinstance(argument, PeerPointer)
            distance, name = (argument.distance, argument.name) if peer else (0, argument)
            place = memories[(rank + distance) % len(memories)].get(name or "")
            holders.append(ctypes.c_void_p(None if place is None else place.address))
        elif isinstance(argument, float):
            holders.append(ctypes.c_float(argument))
        else:
            number = rank if isinstance(argument, RankNumber) else argument
            holders.append(ctypes.c_int32(number))
    return holders


@cache
def _shared_memory() -> np.ndarray:
    """Return the last block's dynamic shared memory. It is poisoned before each block."""
    place = (ctypes.c_ubyte * SHARED_BYTES).in_dll(emulator_library(), SHARED_SYMBOL)
    return np.frombuffer(place, np.uint8)


_HELD_BACK: set[Kernel] = set()


def staged_before_the_wait(launch: OpLaunch, inputs: Arrays) -> Iterator[np.ndarray]:
    """Return the dynamic shared memory of each block when it waits for earlier launches.

    ``inputs`` has all tensors that it reads until then. Others are absent.
    """
    emulator = emulator_library()
    memory = {name: guarded(array) for name, array in inputs.items()}
    x, y, z = launch.grid
    for block in np.ndindex(z, y, x):
        emulator.emulation_stop_at_wait(1)
        emulator.emulation_stopped_block(*reversed(block))
        try:
            emulate(replace(launch, programmatic=False), memory)
        finally:
            emulator.emulation_stop_at_wait(0)
        yield _shared_memory()[: launch.shared_bytes].copy()


def _hold_back(name: str, run: Callable[[], int], memory: Mapping[str, Guarded]) -> None:
    """Raise AssertionError if the first block writes before it waits for earlier launches.

    Those may still read this memory, since a scratch buffer has earlier uses.
    """
    before = {key: place.data.copy() for key, place in memory.items()}
    emulator = emulator_library()
    emulator.emulation_stop_at_wait(1)
    try:
        run()
    finally:
        emulator.emulation_stop_at_wait(0)
    for key, place in memory.items():
        assert np.array_equal(place.data, before[key]), (
            f"{name} writes {key} before it waits for the launches in front"
        )


@cache
def _compiler() -> str:
    """Return the version of g++ and its target."""
    words = ["g++", "-v"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stderr


@cache
def _emulator_digest() -> str:
    """Return a digest of the emulator's sources, the compiler and the flags."""
    files = sorted(EMULATED.iterdir())
    contents = [part for file in files for part in (file.name, file.read_bytes())]
    return digest(_compiler(), repr((COMMON_FLAGS, KERNEL_FLAGS, EMULATOR_FLAGS)), *contents)


@cache
def _emulator() -> Path:
    """Return the library that runs the threads, which all kernels share.

    Kernels find it by its name among the loaded libraries, wherever the store is.
    """
    sources, key = sorted(EMULATED.glob("*.cpp")), _emulator_digest()
    name = f"emulator-{key}.so"

    def compiled(entry: Path) -> None:
        _compile(sources, entry / name, *EMULATOR_FLAGS, f"-Wl,-soname,{name}")

    library = content_store().made("emulators", key, compiled) / name
    if name not in _LOADED:
        _LOADED[name] = ctypes.CDLL(str(library))
    return library


def emulator_library() -> ctypes.CDLL:
    """Return the library that kernels use: the first of its name, even if the store changed."""
    return _LOADED[_emulator().name]


@cache
def _precompiled() -> Path:
    """Return the parsed header that every kernel includes first. g++ finds it next to .gch."""
    header = EMULATED / "cuda_emulation.h"

    def compiled(entry: Path) -> None:
        _compile([header], entry / f"{header.name}.gch", *KERNEL_FLAGS)

    return content_store().made("headers", _emulator_digest(), compiled) / header.name


def emulated_entry(kernel: Kernel) -> Any:
    """Return a compiled kernel. Call it with grid, block and an array of argument pointers."""
    LAUNCHED.add(kernel)
    return compiled_entry(kernel)


def kernel_key(kernel: Kernel) -> str:
    """Return a digest of the kernel's source, headers and constants, and of the emulator."""
    return digest(kernel.entry, source_of(kernel).digest([_emulator_digest()]))


@cache
def compiled_entry(kernel: Kernel) -> Any:
    """Return the function that runs the kernel, from the store if it was compiled before."""
    return ctypes.CDLL(str(compiled_path(kernel))).run_kernel


def compiled_path(kernel: Kernel) -> Path:
    """Return the library of the kernel."""
    source = source_of(kernel)
    text = (
        f'#include "{source.path}"\n'
        'extern "C" int run_kernel(const unsigned* grid, unsigned block, void** arguments) {\n'
        f"  return emulation::launch({kernel.entry}, grid, block, arguments);\n"
        "}\n"
    )
    emulator = str(_emulator())

    def compiled(entry: Path) -> None:
        path = entry / "kernel.cpp"
        path.write_text(text)
        # A kernel needs only the symbols of the emulator's library.
        link = ["-shared", "-nostdlib", emulator]
        include = ["-include", str(_precompiled())]
        _compile([path], entry / "kernel.so", *KERNEL_FLAGS, *source.definitions(), *include, *link)

    return content_store().made("kernels", kernel_key(kernel), compiled) / "kernel.so"


def _compile(sources: Sequence[Path], made: Path, *arguments: str) -> None:
    words = ["g++", *COMMON_FLAGS, *map(str, sources), *arguments, "-o", str(made)]
    subprocess.run(words, check=True)
