"""Replays an engine's plan on a GPU: the device's state by port, programs by name."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.state_layout import state_layout
from specbuild.runtime.engine_dir.manifest import Limits, StateGroup
from specbuild.runtime.engine_dir.plan import Plan, Port, ProgramEntry, Space
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle
from specbuild.runtime.executors.cuda.kernel_arguments import ReadFile
from specbuild.runtime.executors.cuda.memory import (
    DeviceMemory,
    PortPlace,
    Ports,
)
from specbuild.runtime.executors.cuda.programs import ProgramRunner, RankAddresses
from specbuild.runtime.executors.cuda.staging import Fetches, Staging
from specbuild.runtime.executors.cuda.state_copies import DeviceStateCopies
from specbuild.runtime.executors.executor import ExecutorCapabilities, StepResult

# Fills the memory of the weights, whose addresses are given by buffer.
LoadWeights = Callable[[tuple[int, ...]], None]


@dataclass(frozen=True)
class PlacedPlan:
    """The buffers of a plan on one GPU, the stream of all their work, and those of other ranks."""

    stream: Handle
    memory: DeviceMemory
    addresses: RankAddresses

    @classmethod
    def on(cls, gpu: Gpu, plan: Plan) -> PlacedPlan:
        """Allocate the buffers. Raises UnsupportedHereError if they do not fit."""
        stream = gpu.new_stream()
        memory = DeviceMemory(gpu, plan, stream)
        return cls(stream, memory, RankAddresses(memory.addresses))


class CudaExecutor:
    """One engine on one GPU, or one rank of it. All work is queued on one stream, in call order.

    ``load_weights`` fills the buffers of the weights; ``read_file`` returns the checked bytes of a
    file of the engine. ``placed`` has its buffers, which the caller releases. Raises
    UnsupportedHereError if the plan does not fit into free memory.
    """

    def __init__(
        self,
        gpu: Gpu,
        plan: Plan,
        read_file: ReadFile,
        load_weights: LoadWeights,
        *,
        recorded: bool = True,
        placed: PlacedPlan | None = None,
    ) -> None:
        self.plan = plan
        self._gpu = gpu
        with contextlib.ExitStack() as closing:
            if placed is None:
                placed = PlacedPlan.on(gpu, plan)
                closing.callback(placed.memory.close)
            self._stream, self._memory = placed.stream, placed.memory
            self._ports = Ports(plan, self._memory)
            self._staging = Staging(gpu, self._stream)
            closing.callback(self._staging.close)
            self._fetches = Fetches(gpu, self._stream)
            closing.callback(self._fetches.close)
            self.runner = ProgramRunner(
                gpu, plan, placed.addresses, read_file, self._stream, recorded=recorded
            )
            closing.callback(self.runner.close)
            load_weights(self._memory.addresses)
            # How often each program was queued.
            self.launched: Counter[str] = Counter()
            ring = ("step", "count", "accepted", "tokens", "logprobs")
            self._done, self._count, self._accepted, self._tokens, self._logprobs = (
                self._ports.ring(f"ring.{name}") for name in ring
            )
            self._counts = {
                name: self._ports.ring(f"ring.{name}")
                for name in ("broken", "checks", "rechecked", "agreed")
                if self._ports.find(f"ring.{name}") is not None
            }
            # Events after the step of each ring entry: for waits that poll, and that sleep.
            self._marks = [gpu.new_event() for _ in self._done]
            self._sleeping_marks = [gpu.new_event(sleeps=True) for _ in self._done]
            # The number of programs started, also up to the step of each ring entry.
            self._num_started = 0
            self._num_started_to = [0] * len(self._marks)
            self._closing = closing.pop_all()

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """Complete steps run on the device; decoding is batch-invariant."""
        return ExecutorCapabilities("cuda", batch_invariant=True, device_step=True)

    def use(self) -> None:
        """Let the calling thread use the executor."""
        self._gpu.use()

    def port(self, name: str) -> Port | None:
        """Return a port of the plan."""
        return self._ports.find(name)

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        """Write values to a port from a row on; they may change after the call."""
        port = self._ports[name]
        data, first = np.ascontiguousarray(values, port.dtype), row * port.row_bytes
        if row < 0 or first + data.nbytes > port.nbytes:
            raise SpecbuildError(
                f"port {name} holds {port.shape}, {values.shape} from row {row} on do not fit"
            )
        self._staging.upload(port.address + first, data)

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        """Set every element of some rows of a port with 32-bit elements."""
        port = self._rows_of(name, row, rows)
        word = int(np.array(value, port.dtype).view(np.uint32))
        address = port.address + row * port.row_bytes
        self._gpu.fill(address, word, rows * port.row_bytes // 4, self._stream)

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        """Copy a row of a port to one of another port, up to the length of the shorter row."""
        read, written = self._rows_of(source, row, 1), self._rows_of(target, target_row, 1)
        self._gpu.copy(
            written.address + target_row * written.row_bytes,
            read.address + row * read.row_bytes,
            min(read.row_bytes, written.row_bytes),
            self._stream,
        )

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        """Return a port's values, or its first ``rows`` rows, after all queued work."""
        count = self._ports[name].shape[0] if rows is None else rows
        port = self._rows_of(name, 0, count)
        data = self._staging.download(port.address, count * port.row_bytes)
        return data.view(port.dtype).reshape(count, *port.shape[1:])

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        """Queue a read of a port; the returned function waits for that and for no later work."""
        port = self._ports[name]
        arrived = self._fetches.start(port.address, port.nbytes)
        return lambda: arrived().view(port.dtype).reshape(port.shape)

    def peek(self, buffer: int, offset: int, nbytes: int) -> np.ndarray:
        """Return bytes of a buffer of the plan, uint8, after all queued work."""
        size = self.plan.buffers[buffer].bytes
        if not 0 <= offset <= offset + nbytes <= size:
            raise SpecbuildError(
                f"buffer {self.plan.buffers[buffer].name} has {size} bytes, {nbytes} from "
                f"{offset} on do not lie in it; build the engine again"
            )
        return self._staging.download(self._memory.addresses[buffer] + offset, nbytes)

    def state_copies(
        self, group: StateGroup, limits: Limits, *, capacity: int
    ) -> DeviceStateCopies:
        """See :class:`SavesStates`."""
        layout = state_layout(group, limits)
        buffer = next(i for i, b in enumerate(self.plan.buffers) if b.name == layout.name)
        address = self._memory.addresses[buffer]
        copies = DeviceStateCopies(self._gpu, self._stream, address, layout, capacity)
        self._closing.callback(copies.close)
        return copies

    def prepare(self, entry: ProgramEntry) -> None:
        """Do everything that the first run of a program would do, except run it."""
        self.runner.prepare(entry)

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        """Queue a program; ``step`` is the number for :meth:`wait_step`."""
        self.launched[entry.name] += 1
        self.runner.start(entry)
        self._num_started += 1
        if step is not None:
            ring_entry = step % len(self._marks)
            self._gpu.record(self._marks[ring_entry], self._stream)
            self._gpu.record(self._sleeping_marks[ring_entry], self._stream)
            self._num_started_to[ring_entry] = self._num_started

    def wait_step(self, number: int, batch: int) -> StepResult:
        """Wait for step ``number`` and return its results; later steps continue.

        The driver waits and releases the GIL, so other threads continue. The thread sleeps while a
        later launch keeps the device busy. Otherwise the device is idle until the host continues,
        so it polls.
        """
        ring_entry = number % len(self._done)
        has_later_launch = self._num_started > self._num_started_to[ring_entry]
        marks = self._sleeping_marks if has_later_launch else self._marks
        self._gpu.wait(marks[ring_entry])
        if self._done[ring_entry] != number + 1:
            raise SpecbuildError(f"step {number} ended without a result; build the engine again")
        return StepResult(
            count=self._count[ring_entry, :batch].tolist(),
            accepted=self._accepted[ring_entry, :batch].tolist(),
            tokens=self._tokens[ring_entry, :batch].tolist(),
            logprobs=self._logprobs[ring_entry, :batch].tolist(),
            **{name: ring[ring_entry, :batch].tolist() for name, ring in self._counts.items()},
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        """The device addresses of the plan's buffers."""
        return self._memory.addresses

    def ring(self, name: str) -> np.ndarray:
        """Return a port in host memory, which shows the device's writes."""
        return self._ports.ring(name)

    def clear(self, space: Space) -> None:
        """Queue zeros for every buffer of a space."""
        for buffer, address in zip(self.plan.buffers, self._memory.addresses, strict=True):
            if buffer.space == space and buffer.bytes:
                self._gpu.fill(address, 0, buffer.bytes // 4, self._stream)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        self._gpu.synchronize(self._stream)

    def give_back(self) -> None:
        """Release its memory, but not the GPU; no queued work may still use it."""
        self._closing.close()

    def close(self) -> None:
        """Release all memory; the executor must not be used afterwards."""
        self._gpu.use()
        self._gpu.synchronize(self._stream)
        self.give_back()
        self._gpu.close()

    def _rows_of(self, name: str, row: int, rows: int) -> PortPlace:
        """Return the port, which must have these rows."""
        port = self._ports[name]
        if not 0 <= row <= row + rows <= port.shape[0]:
            raise SpecbuildError(
                f"port {name} holds {port.shape}, {rows} rows from row {row} on do not fit; "
                "build the engine again"
            )
        return port
