"""Converts SIGTERM to an exception, so that it cleans up as ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from specbuild.cli.terminal.failures import TerminatedError


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """Raise TerminatedError in the main thread at SIGTERM, unless another handler is set."""
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
