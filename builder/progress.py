"""The interface for progress reports; the command line displays them."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a build, and their progress."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """Begin a new stage of ``total`` ``unit``s; the previous one ends."""

    def advance(self, amount: int) -> None:
        """Count ``amount`` more finished units of the stage."""

    def note(self, message: str) -> None:
        """Report a fact, such as the size of the output."""


class SilentProgress:
    """Reports nothing."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """Ignored."""

    def advance(self, amount: int) -> None:
        """Ignored."""

    def note(self, message: str) -> None:
        """Ignored."""
