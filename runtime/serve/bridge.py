"""Delivery of events from the engine's thread to an event loop, with one wake-up per step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from specbuild.runtime.decode.session import EventBatch


class Bridge:
    """Delivers batches of events to their receivers on the event loop in which it was created.

    A step of the engine produces a batch for every stream. The first batch wakes the loop, which
    then delivers all of them. A deque needs no lock: the engine's thread appends before it reads
    the flag, and the loop clears the flag before it reads the deque.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Callable[[EventBatch], None], EventBatch]] = deque()
        self._is_woken = False

    def sender(self, receive: Callable[[EventBatch], None]) -> Callable[[EventBatch], None]:
        """Return the function for the engine's thread that runs ``receive`` on the loop."""

        def send(batch: EventBatch) -> None:
            self._waiting.append((receive, batch))
            if not self._is_woken:
                self._is_woken = True
                # The loop is closed after shutdown; the events have no receiver then.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._deliver)

        return send

    def _deliver(self) -> None:
        self._is_woken = False
        waiting = self._waiting
        while waiting:
            receive, batch = waiting.popleft()
            receive(batch)
