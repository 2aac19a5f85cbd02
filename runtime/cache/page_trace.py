"""Who held which cache page, and when: a file of JSON lines for who looks for a lost page.

Every line has ``t``, seconds since the trace began, and ``event``. The owner of a page is the
number under which its sequence was admitted: a request that lost its pages comes back as another.
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
# What waits for a disk that does not keep up; more is counted and not written.
MAX_QUEUED_LINES = 1 << 20
_WRITE_INTERVAL_S = 0.1
log = logging.getLogger("specbuild")


class PageTrace:
    """Takes events from the thread that decodes, and writes them from one of its own.

    Raises RequestError where the file cannot be written. A disk that fails later ends the trace,
    not the requests.
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
        """A line, soon; values must not change any more."""
        if self._failed:
            return
        if len(self._queue) >= MAX_QUEUED_LINES:
            self._lost += 1
            return
        self._queue.append((time.monotonic() - self._started_s, event, fields))

    def close(self) -> None:
        """Writes what is left."""
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
        """Line by line, so that who decodes waits for one at most."""
        lost, self._lost = self._lost, 0
        for _ in range(len(self._queue)):
            t, event, fields = self._queue.popleft()
            self._file.write(json.dumps({"t": round(t, 6), "event": event, **fields}) + "\n")
        if lost:
            self._file.write(json.dumps({"event": "lost", "lines": lost}) + "\n")
        self._file.flush()
