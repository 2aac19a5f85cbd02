"""A GPU in host memory: streams run late, one operation at a time, when the host waits."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from specbuild.runtime.executors.cuda.gpu import GpuFacts, HostMemory, LaunchConfig

HOPPER = GpuFacts("Fake H200", (9, 0), 132, 13000, 1 << 30)
_FIRST_ADDRESS = 0x7000_0000_0000
# Unwritten memory: NaN as fp32, -1 as int32.
_POISON = 0xFF


@dataclass
class Stream:
    """Operations that have not run yet."""

    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    recording: list[Callable[[], None]] | None = None


@dataclass
class Event:
    """An event that has passed at once, or when the stream reaches it.

    ``time_s`` counts operations.
    """

    pending: int = 0
    stream: Stream | None = None
    time_s: float = 0.0
    sleeps: bool = False


@dataclass(frozen=True)
class FakeKernel:
    """A callable on argument values. ``kinds`` has ``p`` (pointer) or ``i`` for each argument."""

    run: Callable[..., None]
    kinds: str


class FakeGpu:
    """A GPU with kernels in Python: the ``entry`` of a plan's kernel names one of ``kernels``.

    Device memory is initially poisoned. ``log`` lists the calls in order.
    """

    def __init__(
        self, kernels: Mapping[str, FakeKernel] | None = None, facts: GpuFacts = HOPPER
    ) -> None:
        self.kernels = dict(kernels or {})
        self.facts = facts
        self.log: list[str] = []
        self.operations = 0
        self.closed = False
        self.last_wait_sleeps = False
        self._next = _FIRST_ADDRESS
        self._memory: dict[int, np.ndarray] = {}
        self._host: dict[int, HostMemory] = {}
        self.shared: dict[str, tuple[int, int]] = {}

    # For tests.

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """Return the device's bytes at an address, which must be within one allocation."""
        for base, memory in self._memory.items():
            if base <= address and address + nbytes <= base + len(memory):
                return memory[address - base : address - base + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are nobody's")

    @property
    def allocations(self) -> int:
        """The number of current allocations."""
        return len(self._memory)

    def enqueue(self, stream: Stream, operation: Callable[[], None]) -> None:
        """Queue an operation like a kernel."""
        stream.waiting.append(operation)

    # The interface that the executor uses.

    def use(self) -> None:
        assert not self.closed

    def free_bytes(self) -> int:
        return self.facts.total_bytes - sum(map(len, self._memory.values()))

    def allocate(self, nbytes: int) -> int:
        assert 0 < nbytes <= self.free_bytes(), "the executor asks before it allocates"
        return self._place(np.full(nbytes, _POISON, np.uint8))

    def release(self, address: int) -> None:
        del self._memory[address]

    def allocate_host(self, nbytes: int) -> HostMemory:
        view = np.full(nbytes, _POISON, np.uint8)
        memory = HostMemory(view.ctypes.data, self._place(view), view)
        self._host[memory.address] = memory
        return memory

    def release_host(self, memory: HostMemory) -> None:
        memory.view[:] = _POISON  # what is still queued must not read it
        del self._host[memory.address]
        self.release(memory.device_address)

    def new_stream(self) -> Stream:
        return Stream()

    def fill(self, address: int, word: int, words: int, stream: Stream) -> None:
        place = self.view(address, 4 * words)
        self.enqueue(stream, lambda: place.view(np.uint32).fill(word))

    def upload(self, address: int, source: int, nbytes: int, stream: Stream) -> None:
        place, data = self.view(address, nbytes), self._locked(source, nbytes)
        self.enqueue(stream, lambda: np.copyto(place, data))

    def download(self, target: int, address: int, nbytes: int, stream: Stream) -> None:
        place, data = self._locked(target, nbytes), self.view(address, nbytes)
        self.enqueue(stream, lambda: np.copyto(place, data))

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        place, data = self.view(target, nbytes), self.view(source, nbytes)
        self.enqueue(stream, lambda: np.copyto(place, data))

    def synchronize(self, stream: Stream) -> None:
        while stream.waiting:
            self._step(stream)

    def new_event(self, *, timed: bool = False, sleeps: bool = False) -> Event:
        del timed
        return Event(sleeps=sleeps)

    def record(self, event: Event, stream: Stream) -> None:
        event.pending, event.stream = event.pending + 1, stream

        def pass_mark() -> None:
            event.pending -= 1
            event.time_s = float(self.operations)

        self.enqueue(stream, pass_mark)

    def wait(self, event: Event) -> None:
        self.last_wait_sleeps = event.sleeps
        while event.pending:
            assert event.stream is not None
            self._step(event.stream)

    def elapsed_s(self, first: Event, last: Event) -> float:
        return last.time_s - first.time_s

    def load_module(self, cubin: bytes, where: str) -> bytes:
        self.log.append(f"load {where}")
        return cubin

    def function(self, module: bytes, entry: str) -> str:
        assert f"cubin of {entry}".encode() in module
        return entry

    def set_shared(self, function: str, shared_bytes: int, carveout: int) -> None:
        self.shared[function] = (shared_bytes, carveout)

    def launch(self, config: LaunchConfig, stream: Stream) -> None:
        kernel = self.kernels[config.function]
        assert config.shared_bytes <= self.shared.get(config.function, (0, 0))[0]
        values = _arguments(config.parameters, kernel.kinds)

        def operation() -> None:
            kernel.run(*values)

        if stream.recording is not None:
            stream.recording.append(operation)
        else:
            self.log.append(f"launch {config.function}")
            self.enqueue(stream, operation)

    def begin_capture(self, stream: Stream) -> None:
        assert stream.recording is None
        stream.recording = []

    def end_capture(self, stream: Stream) -> list[Callable[[], None]]:
        graph, stream.recording = stream.recording, None
        assert graph is not None
        return graph

    def launch_graph(self, graph: list[Callable[[], None]], stream: Stream) -> None:
        self.log.append("graph")
        stream.waiting.extend(graph)

    def release_graph(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def close(self) -> None:
        self.closed = True

    def _place(self, memory: np.ndarray) -> int:
        address = self._next
        self._memory[address] = memory
        self._next += -(-len(memory) // 4096) * 4096 + 4096
        return address

    def _locked(self, address: int, nbytes: int) -> np.ndarray:
        for base, memory in self._host.items():
            if base <= address and address + nbytes <= base + len(memory.view):
                return memory.view[address - base : address - base + nbytes]
        raise AssertionError("copies go through page-locked memory")

    def _step(self, stream: Stream) -> None:
        self.operations += 1
        stream.waiting.popleft()()


def _arguments(parameters: int, kinds: str) -> list[int]:
    """Return the values of the arguments, read as the driver reads them."""
    pointers = (ctypes.c_uint64 * len(kinds)).from_address(parameters)
    types = {"p": ctypes.c_uint64, "i": ctypes.c_int32}
    return [
        int(types[kind].from_address(pointer).value)
        for kind, pointer in zip(kinds, pointers, strict=True)
    ]
