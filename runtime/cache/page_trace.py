"""Traces the holders of cache pages to a JSON Lines file, to find lost pages.

Every line has ``t``, the seconds since the start of the trace, and ``event``. The owner of a page
is the number of an admitted sequence. A preempted request gets a new number.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from specbuild.runtime.errors import RequestError

TRACE_VERSION = 1
# Capacity of the queue. Further lines are counted and dropped.
MAX_QUEUED_LINES = 1 << 20
_WRITE_INTERVAL_S = 0.1
log = logging.getLogger("specbuild")


class PageTrace:
    """Collects events from the decoding thread and writes them on a thread of its own.

    Raises RequestError if the file cannot be written. A later disk error ends the trace, not the
    requests.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._file = file.open("w", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"the trace cannot be written: {error}") from error
        self._started_s = time.monotonic()
        self._queue: deque[tuple[float, str, dict[str, Any]]] = deque()
        self._lost = 0
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="specbuild-trace", daemon=True)
        self._thread.start()

    def add(self, event: str, **fields: Any) -> None:
        """Queue a line. The values must not change afterwards."""
        if self._failed:
            return
        if len(self._queue) >= MAX_QUEUED_LINES:
            self._lost += 1
            return
        self._queue.append((time.monotonic() - self._started_s, event, fields))

    def close(self) -> None:
        """Write the queued lines and close the file."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> PageTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        try:
            with self._file:
                while not self._closing.wait(_WRITE_INTERVAL_S):
                    self._write_queue()
                self._write_queue()
        except OSError as error:
            self._failed = True
            log.warning("the trace ends here: %s", error)

    def _write_queue(self) -> None:
        """Write line by line, so that the decoding thread waits for at most one line."""
        lost, self._lost = self._lost, 0
        for _ in range(len(self._queue)):
            t, event, fields = self._queue.popleft()
            self._file.write(json.dumps({"t": round(t, 6), "event": event, **fields}) + "\n")
        if lost:
            self._file.write(json.dumps({"event": "lost", "lines": lost}) + "\n")
        self._file.flush()
