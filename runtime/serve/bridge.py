"""Delivery of events from the engine's thread to an event loop, with one wake-up per step."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from specbuild.runtime.decode.session import EventBatch


class Bridge:
    """Delivers batches of events to their receivers on the event loop in which it was created.

    A step of the engine produces a batch for every stream. The first batch wakes the loop, which
    then delivers all of them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[EventBatch], None], EventBatch]] = deque()
        self._is_woken = False

    def sender(self, receive: Callable[[EventBatch], None]) -> Callable[[EventBatch], None]:
        """Return the function for the engine's thread that runs ``receive`` on the loop."""

        def send(batch: EventBatch) -> None:
            with self._lock:
                self._waiting.append((receive, batch))
                wake, self._is_woken = not self._is_woken, True
            if wake:
                # The loop is closed after shutdown; the events have no receiver then.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._deliver)

        return send

    def _deliver(self) -> None:
        with self._lock:
            batches, self._waiting = self._waiting, deque()
            self._is_woken = False
        for receive, batch in batches:
            receive(batch)
