"""Measures the anonymous memory of a process, which excludes mapped files."""

from __future__ import annotations

from pathlib import Path

from specbuild.runtime.background_thread import BackgroundThread

_STATUS = Path("/proc/self/status")
_INTERVAL_S = 0.02


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process, or 0 if it cannot be read."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class MemoryWatch(BackgroundThread):
    """Samples :func:`anonymous_bytes` in the background and stores the peak."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        super().__init__("memory-watch")

    def run(self) -> None:
        """Sample until the thread is stopped."""
        while True:
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
            if self.changed.wait(_INTERVAL_S):
                return
