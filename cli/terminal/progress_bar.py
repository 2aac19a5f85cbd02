"""The builder's progress on standard error: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specbuild.cli.terminal.console import messages, size_text


class ProgressBar:
    """Draws ``builder.progress.Progress``; use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = messages() if console is None else console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._done, self._total, self._unit = 0, 0, ""

    def __enter__(self) -> ProgressBar:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish_stage()
        self._bars.stop()

    def start(self, stage: str, total: int, unit: str) -> None:
        """A new stage of ``total`` ``unit``s begins; the one before is over."""
        self._finish_stage()
        self._done, self._total, self._unit = 0, total, unit
        if not self._console.is_terminal:
            self._print(f"{stage}: {self._amount(total)}")
        self._task = self._bars.add_task(stage, total=total, amount=self._shown())

    def advance(self, amount: int) -> None:
        """``amount`` more units of the stage are done."""
        self._done += amount
        if self._task is not None:
            self._bars.update(self._task, advance=amount, amount=self._shown())

    def note(self, message: str) -> None:
        """A fact worth telling, above the bars."""
        self._print(message)

    def _finish_stage(self) -> None:
        if self._task is not None:
            whole = self._amount(self._total)
            self._bars.update(self._task, completed=self._total, amount=whole)
            self._bars.stop_task(self._task)
            self._task = None

    def _shown(self) -> str:
        return f"{self._amount(self._done)} of {self._amount(self._total)}"

    def _amount(self, amount: int) -> str:
        unit = self._unit.removesuffix("s")
        if unit in ("B", "byte"):
            return size_text(amount)
        return f"{amount} {unit}" if amount == 1 else f"{amount} {unit}s"

    def _print(self, message: str) -> None:
        self._console.print(message, soft_wrap=True)
