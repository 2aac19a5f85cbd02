"""One engine on several GPUs of a host: every rank runs the host's requests in the same order.

The ranks' kernels wait for each other, so a call that waits for one GPU needs the same programs
queued on all of them. A program is therefore prepared on every rank before any launches it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from specbuild.runtime.engine_dir.plan import (
    EXCHANGE_EPOCH,
    EXCHANGE_FAULT,
    EXCHANGE_LIMIT,
    Plan,
    Port,
    ProgramEntry,
)
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.executor import CudaExecutor, PlacedPlan
from specbuild.runtime.executors.cuda.gpu import Gpu
from specbuild.runtime.executors.cuda.kernel_arguments import ReadFile
from specbuild.runtime.executors.cuda.programs import RankAddresses
from specbuild.runtime.executors.executor import ExecutorCapabilities, StepResult

# Fills the weights of a rank, whose buffers' addresses are given.
LoadRank = Callable[[int, tuple[int, ...]], None]
# The time limit of a kernel's wait for another GPU, which nothing else could end.
LIMIT_MS = 20_000
# Rounds are numbered by 32 bits, and a stale word must never have the number of a new round. After
# this number they are counted from 0 again.
MAX_ROUNDS = 1 << 31
# Programs that a message may have to name: more than can be in flight.
_REMEMBERED = 64


class RankedExecutor:
    """One engine on as many GPUs as its plan has ranks, with the interface of one.

    The host reads rank 0. ``load_weights(rank, addresses)`` fills the weights of a rank, for all
    ranks concurrently. Raises as :class:`CudaExecutor`; if a GPU fails later, the SpecbuildError
    names it.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        plan: Plan,
        read_file: ReadFile,
        load_weights: LoadRank,
        *,
        recorded: bool = True,
        numbers: Sequence[int] = (),
    ) -> None:
        assert len(gpus) == plan.ranks
        self.plan = plan
        self._gpus = tuple(gpus)
        self._numbers = tuple(numbers) or tuple(range(len(gpus)))
        self._rounds = 0
        self._started: deque[tuple[str, int, int]] = deque(maxlen=_REMEMBERED)
        self._ranks: list[CudaExecutor] = []
        with contextlib.ExitStack() as closing:
            placed = self._placed(closing)
            for gpu, buffers in zip(gpus, placed, strict=True):
                gpu.use()
                executor = CudaExecutor(
                    gpu, plan, read_file, lambda _: None, recorded=recorded, placed=buffers
                )
                closing.callback(_on, gpu, executor.give_back)
                self._ranks.append(executor)
            self._load(load_weights, [buffers.memory.addresses for buffers in placed])
            self._restart_rounds()
            self._closing = closing.pop_all()

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """The capabilities of one GPU: a rank's bits do not depend on the others' speed."""
        return self._ranks[0].capabilities

    @property
    def launched(self) -> Counter[str]:
        """How often each program was queued."""
        return self._ranks[0].launched

    @property
    def ranks(self) -> tuple[CudaExecutor, ...]:
        """The executor of each GPU, by rank."""
        return tuple(self._ranks)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs by rank."""
        return self._gpus

    def use(self) -> None:
        """Let the calling thread use the executor."""
        with self._gpu_errors():
            self._gpus[0].use()

    def port(self, name: str) -> Port | None:
        """Return a port of the plan."""
        return self._ranks[0].port(name)

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        """Write values to a port of every rank from a row on."""
        self._all(lambda rank: rank.write(name, values, row=row))

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        """Set every element of some rows of a port with 32-bit elements, on every rank."""
        self._all(lambda rank: rank.fill(name, value, row=row, rows=rows))

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        """Copy a row of a port to one of another port, on every rank."""
        self._all(lambda rank: rank.copy(source, row, target, target_row))

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        """Return a port's values on rank 0, or its first ``rows`` rows, after all queued work."""
        with self._gpu_errors():
            return self._first.read(name, rows=rows)

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        """Queue a read of a port of rank 0; the returned function waits for that."""
        with self._gpu_errors():
            arrived = self._first.fetch(name)

        def values() -> np.ndarray:
            with self._gpu_errors():
                self.use()
                return arrived()

        return values

    def peek(self, buffer: int, offset: int, nbytes: int) -> np.ndarray:
        """Return bytes of a buffer of rank 0, uint8, after all queued work."""
        with self._gpu_errors():
            return self._first.peek(buffer, offset, nbytes)

    def prepare(self, entry: ProgramEntry) -> None:
        """Do everything that the first run of a program would do, except run it, on every rank."""
        self._all(lambda rank: rank.prepare(entry))

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        """Queue a program on every rank; ``step`` is the number for :meth:`wait_step`."""
        self.prepare(entry)
        if self._rounds + entry.rounds > MAX_ROUNDS:
            self._restart_rounds()
        self._started.append((entry.name, self._rounds, entry.rounds))
        self._rounds += entry.rounds
        self._all(lambda rank: rank.start(entry, step))

    def wait_step(self, number: int, batch: int) -> StepResult:
        """Wait for step ``number`` and return its results on rank 0."""
        with self._gpu_errors():
            return self._first.wait_step(number, batch)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        self._all(lambda rank: rank.synchronize())

    def close(self) -> None:
        """Release all memory; the executor must not be used afterwards."""
        # From here on no rank's kernels write to the memory of another one.
        self.synchronize()
        self._closing.close()
        for gpu in self._gpus:
            gpu.close()

    @property
    def _first(self) -> CudaExecutor:
        """Return rank 0, for a call by this thread."""
        self.use()
        return self._ranks[0]

    def _placed(self, closing: contextlib.ExitStack) -> list[PlacedPlan]:
        """Return every rank's buffers, with the addresses of the others."""
        placed = []
        for rank, gpu in enumerate(self._gpus):
            gpu.use()
            for peer in self._gpus:
                if peer is not gpu:
                    gpu.reach(peer)
            try:
                placed.append(PlacedPlan.on(gpu, self.plan))
            except UnsupportedHereError as error:
                raise UnsupportedHereError(f"GPU {self._numbers[rank]}: {error}") from error
            closing.callback(_on, gpu, placed[-1].memory.close)
        own_addresses = [each.memory.addresses for each in placed]
        return [
            replace(
                each,
                addresses=RankAddresses(
                    own_addresses[r], r, (*own_addresses[r + 1 :], *own_addresses[:r])
                ),
            )
            for r, each in enumerate(placed)
        ]

    def _load(self, load_weights: LoadRank, addresses: Sequence[tuple[int, ...]]) -> None:
        def load(rank: int) -> None:
            self._gpus[rank].use()
            load_weights(rank, addresses[rank])

        with ThreadPoolExecutor(len(self._gpus), thread_name_prefix="rank") as pool:
            for _ in pool.map(load, range(len(self._gpus))):
                pass

    def _all(self, call: Callable[[CudaExecutor], None]) -> None:
        """Call the function with every rank in turn, as the GPU of this thread."""
        with self._gpu_errors():
            for gpu, rank in zip(self._gpus, self._ranks, strict=True):
                gpu.use()
                call(rank)

    def _restart_rounds(self) -> None:
        """Count rounds from 0 again, when no wait for an earlier word remains."""
        self.synchronize()
        self._all(lambda rank: rank.clear("exchange"))
        self._all(lambda rank: rank.fill(EXCHANGE_EPOCH, 0))
        self._all(lambda rank: rank.fill(EXCHANGE_LIMIT, LIMIT_MS))
        # All inboxes must be empty before any rank writes to one.
        self.synchronize()
        self._rounds = 0
        self._started.clear()

    @contextlib.contextmanager
    def _gpu_errors(self) -> Iterator[None]:
        """Convert errors of a GPU to those of the engine: the failed GPU, and which only waited."""
        try:
            yield
        except SpecbuildError as error:
            sentence = self._sentence() if type(error) is SpecbuildError else ""
            if not sentence:
                raise
            raise SpecbuildError(sentence) from error

    def _sentence(self) -> str:
        """Return which GPUs failed; empty if none did. Waits until all have finished."""
        failed, waits = [], []
        for number, gpu, rank in zip(self._numbers, self._gpus, self._ranks, strict=True):
            fault = rank.ring(EXCHANGE_FAULT)
            try:
                gpu.use()
                rank.synchronize()
            except SpecbuildError as error:
                if not fault[0]:
                    failed.append(f"GPU {number}: {error}")
            if fault[0]:
                waits.append(self._wait(fault))
        if failed or not waits:
            return "; ".join([*failed, *waits])
        return f"{'; '.join(waits)}; start the process again"

    def _wait(self, fault: np.ndarray) -> str:
        _, rank, peer, exchange, number = (int(word) for word in fault[:5])
        last = number % (1 << 32) - 1
        programs = [name for name, first, count in self._started if first <= last < first + count]
        where = f" of {programs[0]}" if programs else ""
        return (
            f"GPU {self._numbers[rank]} waited {LIMIT_MS / 1000:g} s for GPU "
            f"{self._numbers[peer]} in exchange {exchange}{where}"
        )


def _on(gpu: Gpu, call: Callable[[], None]) -> None:
    gpu.use()
    call()
