"""How much memory a process holds of its own, beyond the files that it has mapped."""

from __future__ import annotations

from pathlib import Path

from specbuild.runtime.background_thread import BackgroundThread

_STATUS = Path("/proc/self/status")
_INTERVAL_S = 0.02


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; 0 where the system does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class MemoryWatch(BackgroundThread):
    """Samples :func:`anonymous_bytes` while its block runs."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        super().__init__("memory-watch")

    def run(self) -> None:
        """Take samples."""
        while True:
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
            if self.changed.wait(_INTERVAL_S):
                return
