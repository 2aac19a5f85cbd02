"""Prints a line every few seconds during work without a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable

from specbuild.runtime.background_thread import BackgroundThread

# Seconds between lines: in the first minute, and later, so that logs of hours stay short.
_SOON_S, _LATER_S = 3.0, 10.0
_FIRST_MINUTE_S = 60.0


class Heartbeat(BackgroundThread):
    """Calls ``say`` with the result of ``text`` for the elapsed seconds; a context manager.

    The first call is after three seconds. ``restart`` begins a new count.
    """

    def __init__(self, text: Callable[[float], str], say: Callable[[str], None]) -> None:
        self._text, self._say = text, say
        self._started_s = time.monotonic()
        super().__init__("heartbeat")

    def restart(self) -> None:
        """Restart the count of seconds."""
        self._started_s = time.monotonic()
        self.changed.set()

    def run(self) -> None:
        """Print a line after every pause; a restart begins a new pause."""
        while True:
            passed_s = time.monotonic() - self._started_s
            pause_s = _SOON_S if passed_s < _FIRST_MINUTE_S else _LATER_S
            if self.changed.wait(pause_s):
                self.changed.clear()
                if self.is_over:
                    return
                continue
            self._say(self._text(time.monotonic() - self._started_s))


def seconds_text(seconds: float) -> str:
    """Return a duration in its two largest units: 75 gives ``1 min 15 s``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"
