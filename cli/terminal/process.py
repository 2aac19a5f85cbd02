"""The standard streams of the process, and SIGTERM as an exception."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from specbuild.cli.terminal.failures import TerminatedError


def fill_closed_streams() -> None:
    """Open the null device for closed standard streams, so that no file takes their place.

    Output on a closed standard error is lost; it never reaches standard output.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - it lasts as long as the process


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """Raise TerminatedError in the main thread at SIGTERM, unless another handler is set.

    The command then cleans up as it does at ctrl-C.
    """
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
