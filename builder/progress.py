"""How long work reports itself; the command line draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a build, and what of each is done."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """A new stage of ``total`` ``unit``s begins; the one before is over."""

    def advance(self, amount: int) -> None:
        """``amount`` more units of the stage are done."""

    def note(self, message: str) -> None:
        """A fact worth telling, such as the size of what will be written."""


class SilentProgress:
    """Reports nothing."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """Ignored."""

    def advance(self, amount: int) -> None:
        """Ignored."""

    def note(self, message: str) -> None:
        """Ignored."""
