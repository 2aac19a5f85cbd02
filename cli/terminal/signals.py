"""SIGTERM as an exception: what was begun is cleared away, as at ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from specbuild.cli.terminal.failures import TerminatedError


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """While it lasts the main thread gets TerminatedError at SIGTERM, if nobody handles it."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise TerminatedError
