"""What replaying a plan asks of a GPU; addresses are plain ints, handles are opaque."""

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
    """Page-locked memory that both sides see: ``view`` is uint8 [bytes]."""

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
    """One GPU. What takes a stream is queued there and returns at once, the rest is immediate.

    Every failure is a SpecbuildError; memory that is not to be had an UnsupportedHereError.
    """

    @property
    def facts(self) -> GpuFacts:
        """What kind of GPU it is."""
        ...

    def use(self) -> None:
        """Makes it the GPU of the calling thread."""
        ...

    def reaches(self, peer: Any) -> bool:
        """Whether its kernels can be let address the memory of another GPU of the same kind."""
        ...

    def reach(self, peer: Any) -> None:
        """Lets its kernels address the memory of another GPU, by that one's addresses."""
        ...

    def free_bytes(self) -> int:
        """Device memory that is not in use."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Device memory; its address."""
        ...

    def release(self, address: int) -> None:
        """Gives device memory back."""
        ...

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Page-locked host memory, mapped for the device."""
        ...

    def release_host(self, memory: HostMemory) -> None:
        """Gives page-locked memory back."""
        ...

    def new_stream(self) -> Handle:
        """A queue of work."""
        ...

    def fill(self, address: int, word: int, words: int, stream: Handle) -> None:
        """Sets ``words`` 32-bit words to the bit pattern ``word``."""
        ...

    def upload(self, address: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copies page-locked memory at ``source`` to the device."""
        ...

    def download(self, target: int, address: int, nbytes: int, stream: Handle) -> None:
        """Copies device memory to page-locked memory at ``target``."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copies within the device."""
        ...

    def synchronize(self, stream: Handle) -> None:
        """Waits until the stream is empty."""
        ...

    def new_event(self, *, timed: bool = False) -> Handle:
        """A mark for a stream."""
        ...

    def record(self, event: Handle, stream: Handle) -> None:
        """Sets the mark behind what is queued so far."""
        ...

    def wait(self, event: Handle) -> None:
        """Waits until the stream has passed the mark; at once if it was never set."""
        ...

    def elapsed_s(self, first: Handle, last: Handle) -> float:
        """Seconds between two timed marks that were passed."""
        ...

    def load_module(self, cubin: bytes, where: str) -> Handle:
        """A compiled file; ``where`` names it in messages."""
        ...

    def function(self, module: Handle, entry: str) -> Handle:
        """An entry point of a module."""
        ...

    def set_shared(self, function: Handle, shared_bytes: int, carveout: int) -> None:
        """Says how much dynamic shared memory launches of a function ask for, at most, and how a
        multiprocessor is to divide its memory for them: see ``shared_carveout``."""
        ...

    def launch(self, config: LaunchConfig, stream: Handle) -> None:
        """Queues a kernel, or adds it to the graph that the stream records."""
        ...

    def begin_capture(self, stream: Handle) -> None:
        """Launches on this stream are recorded from now on, not run."""
        ...

    def end_capture(self, stream: Handle) -> Handle:
        """The recorded launches as a graph that can be run."""
        ...

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        """Queues a graph."""
        ...

    def release_graph(self, graph: Handle) -> None:
        """Forgets a graph."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...
