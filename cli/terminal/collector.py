"""Python's collector of cycles, out of the way while a process starts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[Callable[[], None]]:
    """Nothing is collected until what is yielded is called, or the context ends.

    Imports make a hundred thousand objects that stay: to look through them again and again is a
    fifth of a server's start. From then on they count as permanent, and no collection stops a
    server for as long as it takes to look through them.
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
