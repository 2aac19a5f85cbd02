"""From the engine's thread to an event loop, with one wake-up for each turn of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from specbuild.runtime.decode.session import EventBatch


class Bridge:
    """Carries batches of events to their receivers on the event loop it is made in.

    A turn of the engine gives every stream a batch; the loop is woken for the first, and finds the
    others there too.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[EventBatch], None], EventBatch]] = deque()
        self._woken = False

    def sender(self, receive: Callable[[EventBatch], None]) -> Callable[[EventBatch], None]:
        """What the engine's thread calls so that ``receive`` is called on the loop."""

        def send(batch: EventBatch) -> None:
            with self._lock:
                self._waiting.append((receive, batch))
                wake, self._woken = not self._woken, True
            if wake:
                # A loop that is closed serves nobody any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._deliver)

        return send

    def _deliver(self) -> None:
        with self._lock:
            batches, self._waiting = self._waiting, deque()
            self._woken = False
        for receive, batch in batches:
            receive(batch)
