"""Work on a thread of its own while a block runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class BackgroundThread(ABC):
    """A context manager that runs :meth:`run` in a daemon thread and joins it at the end.

    ``run`` waits on :attr:`changed`. The end of the block sets it, after :attr:`is_over`; a
    subclass may set it earlier to interrupt the wait. An exception of ``run`` ends the thread, not
    the block.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Event()
        self.is_over = False
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_over = True
        self.changed.set()
        self._thread.join()

    @abstractmethod
    def run(self) -> None:
        """Do the work; return soon after :attr:`changed` is set and :attr:`is_over`."""
