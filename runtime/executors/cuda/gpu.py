"""The interface of a GPU for replaying a plan; addresses are ints, handles are opaque."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

Handle: TypeAlias = Any


@dataclass(frozen=True)
class GpuFacts:
    """A GPU and its driver. ``driver_version`` is 1000·major + 10·minor of CUDA."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    driver_version: int
    total_bytes: int


@dataclass(frozen=True)
class HostMemory:
    """Page-locked memory that host and device access: ``view`` is uint8 [bytes]."""

    address: int
    device_address: int
    view: np.ndarray


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One kernel launch: ``parameters`` is the address of an array of pointers to arguments."""

    function: Handle
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    programmatic: bool
    parameters: int


class Gpu(Protocol):
    """One GPU. Operations with a stream are queued there and return at once; others block.

    Every failure is a SpecbuildError; a failed allocation is an UnsupportedHereError.
    """

    @property
    def facts(self) -> GpuFacts:
        """The kind of GPU."""
        ...

    def use(self) -> None:
        """Make it the GPU of the calling thread."""
        ...

    def reaches(self, peer: Any) -> bool:
        """Return whether its kernels can access the memory of another GPU of the same kind."""
        ...

    def reach(self, peer: Any) -> None:
        """Let its kernels access the memory of another GPU, by its addresses."""
        ...

    def free_bytes(self) -> int:
        """Return the free device memory in bytes."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory; return its address."""
        ...

    def release(self, address: int) -> None:
        """Release device memory."""
        ...

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Allocate page-locked host memory, mapped for the device."""
        ...

    def release_host(self, memory: HostMemory) -> None:
        """Release page-locked memory."""
        ...

    def new_stream(self) -> Handle:
        """Return a new stream."""
        ...

    def fill(self, address: int, word: int, words: int, stream: Handle) -> None:
        """Set ``words`` 32-bit words to the bit pattern ``word``."""
        ...

    def upload(self, address: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copy page-locked memory at ``source`` to the device."""
        ...

    def download(self, target: int, address: int, nbytes: int, stream: Handle) -> None:
        """Copy device memory to page-locked memory at ``target``."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copy within the device."""
        ...

    def synchronize(self, stream: Handle) -> None:
        """Wait until the stream is empty."""
        ...

    def new_event(self, *, timed: bool = False, sleeps: bool = False) -> Handle:
        """Return a new event. A thread that waits for it polls, unless it ``sleeps``.

        Polling takes a processor. Sleeping takes some microseconds longer.
        """
        ...

    def record(self, event: Handle, stream: Handle) -> None:
        """Record the event after the work queued so far."""
        ...

    def wait(self, event: Handle) -> None:
        """Wait until the stream has passed the event; return at once if it was never recorded."""
        ...

    def elapsed_s(self, first: Handle, last: Handle) -> float:
        """Return the seconds between two timed events that have passed."""
        ...

    def load_module(self, cubin: bytes, where: str) -> Handle:
        """Load a compiled file; ``where`` names it in messages."""
        ...

    def function(self, module: Handle, entry: str) -> Handle:
        """Return an entry point of a module."""
        ...

    def set_shared(self, function: Handle, shared_bytes: int, carveout: int) -> None:
        """Set the maximum dynamic shared memory of a function's launches, and the division of a
        multiprocessor's memory: see ``shared_carveout``.
        """
        ...

    def launch(self, config: LaunchConfig, stream: Handle) -> None:
        """Queue a kernel, or add it to the graph that the stream records."""
        ...

    def begin_capture(self, stream: Handle) -> None:
        """Record launches on this stream from now on, without running them."""
        ...

    def end_capture(self, stream: Handle) -> Handle:
        """Return the recorded launches as an executable graph."""
        ...

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        """Queue a graph."""
        ...

    def release_graph(self, graph: Handle) -> None:
        """Release a graph."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
