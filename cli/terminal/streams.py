"""Handles standard streams that are closed."""

from __future__ import annotations

import os
import sys


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
