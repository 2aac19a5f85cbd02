"""Serves a CUDA engine without a GPU: a stand-in executor whose launches take a fixed time.

The plan, the tokenizer, the loop and the server are those of ``specbuild serve``; only the work of
the device is left out. So the host's time is measured on any machine, by ``host_share.py``.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specbuild.runtime.engine as engine_module
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import Plan, Port, ProgramEntry
from specbuild.runtime.executors.cuda.check import read_plan
from specbuild.runtime.executors.executor import ExecutorCapabilities, OpenedEngine, StepResult
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.tokenizer import TOKENIZER_FILE

_PR_SET_TIMERSLACK = 29
_TYPES = {"bfloat16": np.uint16}


class StandInExecutor:
    """A device executor that computes nothing. Each launch ends a fixed time after the one before.

    Sequences emit the tokens of ``text`` in turn, each from a place of its own. A draft token is
    accepted with the probability ``acceptance`` if those before it were.
    """

    def __init__(
        self,
        plan: Plan,
        text: Sequence[int],
        *,
        step_s: float,
        prefill_s: float,
        acceptance: float,
    ) -> None:
        self.plan = plan
        self._ports = {port.name: port for port in plan.ports}
        self._data = {
            port.name: np.zeros(port.shape, _TYPES.get(port.dtype, port.dtype))
            for port in plan.ports
        }
        self._text = np.array(text, np.int32)
        # The tokens from each place on, as many as a step of each depth emits.
        self._period = len(text) // 2
        deepest = max(entry.draft_depth for entry in plan.programs)
        self._texts = [
            np.lib.stride_tricks.sliding_window_view(self._text, 1 + depth)
            for depth in range(1 + deepest)
        ]
        batch = max(entry.batch for entry in plan.programs)
        self._places = 7919 * np.arange(batch) % (self._period - deepest)
        self._step_s, self._prefill_s, self._acceptance = step_s, prefill_s, acceptance
        self._random = np.random.default_rng(0)
        self._ends_s = 0.0
        self._results: dict[int, tuple[float, StepResult]] = {}

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """Those of the executor for CUDA."""
        return ExecutorCapabilities("cuda", batch_invariant=True, device_step=True)

    def use(self) -> None:
        """Let timers of the calling thread end on time: by default they are 50 µs late."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)

    def port(self, name: str) -> Port | None:
        """Return a port of the plan."""
        return self._ports.get(name)

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        """Write values to a port from a row on."""
        flat, first = self._data[name].reshape(-1), row * self._data[name][0].size
        flat[first : first + values.size] = values.reshape(-1)

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        """Set every element of some rows."""
        self._data[name][row : row + rows] = value

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        """Copy a row, up to the length of the shorter one."""
        read, written = self._data[source][row : row + 1], self._data[target]
        size = min(read.size, written[target_row].size)
        written[target_row : target_row + 1].reshape(-1)[:size] = read.reshape(-1)[:size]

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        """Return a port's values after all launches."""
        self.synchronize()
        return self._data[name][:rows].copy()

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        """Return a function that waits for the launches so far and returns a port's values."""
        ends_s, values = self._ends_s, self._data[name].copy()

        def fetched() -> np.ndarray:
            _sleep_until(ends_s)
            return values

        return fetched

    def prepare(self, entry: ProgramEntry) -> None:
        """Do nothing: there is nothing to load."""

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        """Queue a program."""
        duration_s = self._step_s if entry.kind == "step" else self._prefill_s
        self._ends_s = max(self._ends_s, time.perf_counter()) + duration_s
        if entry.kind == "prefill":
            choice = self._data["prefill.choice"]
            choice[:] = self._random.choice(self._text, choice.shape)
        if step is not None:
            self._data["step"][0] = step + 1
            self._results[step] = (self._ends_s, self._result(entry))

    def _result(self, entry: ProgramEntry) -> StepResult:
        n, depth, data = entry.batch, entry.draft_depth, self._data
        done = data["adjusted_done" if entry.changes_logits else "done"][:n]
        length, live = data["length"][:n], (done == 0).astype(np.int32)
        accepted = live * 0
        if depth:
            is_right = self._random.random((n, depth)) < self._acceptance
            accepted = live * np.logical_and.accumulate(is_right, axis=1).sum(axis=1)
        left = data["limit"][:n] - length
        count = np.minimum(live * (accepted + 1), left)
        places = self._places[:n] + length % self._period
        length += count
        done |= count == left
        return StepResult(
            count=count.tolist(),
            accepted=accepted.tolist(),
            tokens=self._texts[depth][places].tolist(),
            logprobs=[[-1.0] * (1 + depth)] * n,
        )

    def wait_step(self, number: int, batch: int) -> StepResult:
        """Wait for the step with this number and return its results."""
        del batch
        ends_s, result = self._results.pop(number)
        _sleep_until(ends_s)
        return result

    def synchronize(self) -> None:
        """Wait for all launches."""
        _sleep_until(self._ends_s)

    def close(self) -> None:
        """Do nothing: no device is held."""


def _sleep_until(ends_s: float) -> None:
    """Wait without the GIL, as a driver's call does."""
    if (left_s := ends_s - time.perf_counter()) > 0:
        time.sleep(left_s)


def stand_in(
    directory: Path, manifest: Manifest, *, step_s: float, prefill_s: float, acceptance: float
) -> OpenedEngine:
    """Return the executor of an engine for CUDA. Its tokens are those of this file's text."""
    tokenizer = (directory / TOKENIZER_FILE).read_bytes()
    source = Path(__file__).read_text(encoding="utf-8")
    ids = TextCodec(tokenizer, None, None).encode(source, raw=True, most_tokens=1 << 20)
    plan = read_plan(directory, manifest)
    executor = StandInExecutor(plan, ids, step_s=step_s, prefill_s=prefill_s, acceptance=acceptance)
    return OpenedEngine(executor, plan.gpu)


def profile_threads(directory: Path, run: Callable[[], None]) -> None:
    """Run a function and write the profile of each thread's processor time, by the thread's name.

    Threads of one name share a file. A profile counts calls for more than they take.
    """
    stats: dict[str, pstats.Stats] = {}

    def profiled(call: Callable[[], None]) -> None:
        profile = cProfile.Profile(time.thread_time)
        try:
            profile.runcall(call)
        finally:
            name = threading.current_thread().name
            stats[name] = stats[name].add(profile) if name in stats else pstats.Stats(profile)

    run_thread = threading.Thread.run
    threading.Thread.run = lambda thread: profiled(lambda: run_thread(thread))  # type: ignore[method-assign]
    try:
        profiled(run)
    finally:
        directory.mkdir(exist_ok=True)
        for name, thread_stats in stats.items():
            thread_stats.dump_stats(directory / f"{name}.prof")


def main() -> None:
    """Serve; other options are those of ``specbuild serve``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", type=Path, help="an engine for CUDA")
    parser.add_argument("--step-ms", metavar="MS", type=float, default=0.75)
    parser.add_argument("--prefill-ms", metavar="MS", type=float, default=1.0)
    parser.add_argument("--acceptance", metavar="P", type=float, default=0.7)
    parser.add_argument("--profile", metavar="DIR", type=Path, help="a cProfile file per thread")
    args, options = parser.parse_known_args()

    def open_engine(directory: Path, manifest: Manifest, **_: Any) -> OpenedEngine:
        return stand_in(
            directory,
            manifest,
            step_s=args.step_ms / 1e3,
            prefill_s=args.prefill_ms / 1e3,
            acceptance=args.acceptance,
        )

    read_manifest(args.engine)
    engine_module.open_engine = open_engine  # type: ignore[assignment]
    sys.argv = ["specbuild", "serve", str(args.engine), *options]
    from specbuild.cli.main import main as run

    if args.profile is None:
        run()
    else:
        profile_threads(args.profile, run)


if __name__ == "__main__":
    main()
