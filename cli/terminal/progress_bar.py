"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specbuild.cli.terminal.console import messages, size_text
from specbuild.cli.terminal.heartbeat import Heartbeat, seconds_text

# The first units of a stage are often slower, so the estimate starts here.
_MIN_ESTIMATED_S = 2.0


class ProgressBar:
    """Draws ``builder.progress.Progress``; use as a context manager.

    Both forms show the finished units, the elapsed time, and an estimate of the remaining time
    after the first units.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = messages() if console is None else console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[remaining]}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._heartbeat = Heartbeat(self._line, self._print)
        self._open = ExitStack()
        self._task: TaskID | None = None
        # Shown on a terminal until the first stage: libraries may take seconds to import.
        self._starting: TaskID | None = None
        self._stage = ""
        self._started_s = time.monotonic()
        self._done, self._total, self._unit = 0, 0, ""

    def __enter__(self) -> ProgressBar:
        self._bars.start()
        if self._console.is_terminal:
            self._starting = self._bars.add_task("starting", total=None, amount="", remaining="")
        else:
            self._open.enter_context(self._heartbeat)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()
        self._end_start()
        if error is None:
            self._finish_stage()
        self._bars.stop()

    def start(self, stage: str, total: int, unit: str) -> None:
        """Begin a new stage of ``total`` ``unit``s; the previous stage ends."""
        self._end_start()
        self._finish_stage()
        self._stage, self._started_s = stage, time.monotonic()
        self._done, self._total, self._unit = 0, total, unit
        if not self._console.is_terminal:
            self._print(f"{stage}: {self._amount(total)}")
            self._heartbeat.restart()
        self._task = self._bars.add_task(stage, total=total, amount=self._done_text(), remaining="")

    def advance(self, amount: int) -> None:
        """Count ``amount`` more finished units of the stage."""
        self._done += amount
        if self._task is not None:
            remaining = self._remaining_text(time.monotonic() - self._started_s)
            self._bars.update(
                self._task, advance=amount, amount=self._done_text(), remaining=remaining
            )

    def note(self, message: str) -> None:
        """Print a line above the bars."""
        self._print(message)

    def _end_start(self) -> None:
        if self._starting is not None:
            self._bars.remove_task(self._starting)
            self._starting = None

    def _finish_stage(self) -> None:
        if self._task is not None:
            total = self._amount(self._total)
            self._bars.update(self._task, completed=self._total, amount=total, remaining="")
            self._bars.stop_task(self._task)
            self._task = None

    def _line(self, passed_s: float) -> str:
        """Return the log line of the stage."""
        if self._task is None:
            return f"starting: {seconds_text(passed_s)}"
        remaining = self._remaining_text(passed_s)
        line = f"{self._stage}: {self._done_text()}, {seconds_text(passed_s)}"
        return f"{line}, {remaining}" if remaining else line

    def _remaining_text(self, passed_s: float) -> str:
        """Return an estimate of the remaining time at the current speed; empty without one."""
        if not 0 < self._done < self._total or passed_s < _MIN_ESTIMATED_S:
            return ""
        return f"about {seconds_text((self._total - self._done) * passed_s / self._done)} left"

    def _done_text(self) -> str:
        return f"{self._amount(self._done)} of {self._amount(self._total)}"

    def _amount(self, amount: int) -> str:
        unit = self._unit.removesuffix("s")
        if unit in ("B", "byte"):
            return size_text(amount)
        return f"{amount} {unit}" if amount == 1 else f"{amount} {unit}s"

    def _print(self, message: str) -> None:
        self._console.print(message, soft_wrap=True)
