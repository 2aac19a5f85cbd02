"""Runs seeds on forked workers; ends those that hang or swell, and replaces those that died."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from fuzz.verdicts import FINDING

# Of the processor; a worker that waits, but not for a processor, may take as many times longer.
MAX_SECONDS = 10.0
_WALL_FACTOR = 4
_MAX_BYTES = 3 << 30
_LOOK_EVERY_S = 0.2
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

Serve = Callable[[Any], None]
Row = dict[str, Any]


@dataclass
class _Worker:
    process: multiprocessing.context.ForkProcess
    pipe: connection.Connection
    seed: int
    row: Row = field(default_factory=dict)
    started: float = 0.0
    cpu_before: float = 0.0
    queued_before: float = 0.0

    def begin(self, seed: int) -> None:
        self.seed, self.row = seed, {"seed": seed}
        self.pipe.send(seed)
        self.clock()

    def clock(self) -> None:
        self.started, self.cpu_before = time.monotonic(), self._cpu_seconds()
        self.queued_before = self._queued_seconds()

    def overrun(self) -> str | None:
        """Why it is to be ended."""
        cpu = self._cpu_seconds() - self.cpu_before
        # A busy machine lets a niced process stand in line for minutes: that is no hang.
        queued = self._queued_seconds() - self.queued_before
        wall = time.monotonic() - self.started - queued
        # Until the mutant is named, modules load and originals run.
        most = MAX_SECONDS * (1 if "kind" in self.row else 6)
        if cpu > most or wall > most * _WALL_FACTOR:
            return f"hangs: {cpu:.0f} s of the processor, {wall:.0f} s without {queued:.0f} in line"
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        if pages * _PAGE > _MAX_BYTES:
            return f"{pages * _PAGE >> 20} MiB of memory"
        return None

    def _queued_seconds(self) -> float:
        """How long it was ready to run and did not; 0 where the kernel does not count it."""
        schedule = Path(f"/proc/{self.process.pid}/schedstat")
        return int(schedule.read_text().split()[1]) / 1e9 if schedule.exists() else 0.0

    def _cpu_seconds(self) -> float:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / _TICK


def verdict_rows(seeds: Iterator[int], jobs: int, serve: Serve) -> Iterator[Row]:
    """A row for every seed, as they come; ``serve`` runs in each of the workers."""
    workers: list[_Worker] = []
    try:
        workers = [w for _ in range(jobs) if (w := _started(seeds, serve)) is not None]
        while workers:
            ready = connection.wait([w.pipe for w in workers], _LOOK_EVERY_S)
            for worker in list(workers):
                row = _heard(worker) if worker.pipe in ready else _overrun(worker)
                if row is None:
                    continue
                yield row
                if worker.process.is_alive() and (seed := next(seeds, None)) is not None:
                    worker.begin(seed)
                    continue
                workers.remove(worker)
                _end(worker)
                if (fresh := _started(seeds, serve)) is not None:
                    workers.append(fresh)
    finally:
        for worker in workers:
            _end(worker)


def _started(seeds: Iterator[int], serve: Serve) -> _Worker | None:
    seed = next(seeds, None)
    if seed is None:
        return None
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    worker = _Worker(process, ours, seed)
    worker.begin(seed)
    return worker


def _heard(worker: _Worker) -> Row | None:
    """The finished row; None where the mutant was only named."""
    try:
        row: Row = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return _finding(worker, f"the process ended with {worker.process.exitcode}")
    worker.row = row
    if "verdict" in row:
        return row
    worker.clock()
    return None


def _overrun(worker: _Worker) -> Row | None:
    try:
        reason = worker.overrun()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None  # it died: its pipe says so next
    if reason is None:
        return None
    worker.process.kill()
    worker.process.join()
    return _finding(worker, reason)


def _finding(worker: _Worker, reason: str) -> Row:
    seconds = round(time.monotonic() - worker.started, 3)
    return {**worker.row, "verdict": FINDING, "reason": reason, "seconds": seconds}


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join()
