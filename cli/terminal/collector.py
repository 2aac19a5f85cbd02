"""Pauses Python's garbage collector of cycles while a process starts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[Callable[[], None]]:
    """Disable collections until the yielded function is called or the context ends.

    Imports create a hundred thousand permanent objects, and repeated scans of them take a fifth of
    a server's start. Afterwards they count as permanent, so that no collection interrupts the
    server to scan them.
    """
    was_enabled = gc.isenabled()
    gc.disable()

    def started() -> None:
        if was_enabled and not gc.isenabled():
            gc.freeze()
            gc.enable()

    try:
        yield started
    finally:
        started()
