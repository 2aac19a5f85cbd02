"""The library that stands in front of the C library's calls: see ``interposed.c``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("interposed.c")
COMPILER = shutil.which("cc")


@dataclass(frozen=True)
class Fault:
    """What happens at call number ``at`` of those below a folder, counted from 1.

    ``signal`` comes, or the call fails with ``error``. ``space``: bytes that the disk takes.
    """

    at: int = -1
    signal: int = -1
    error: int = -1
    space: int = -1

    def __str__(self) -> str:
        if self.space >= 0:
            return f"disk full after {self.space} bytes"
        return f"signal {self.signal}" if self.signal >= 0 else os.strerror(self.error)


NONE = Fault()


def compiled(folder: Path, source: Path = SOURCE) -> Path:
    """The library of a source, made in ``folder``."""
    assert COMPILER is not None
    library = folder / f"{source.stem}.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


def preloaded(*libraries: Path) -> dict[str, str]:
    """The environment of a process that has the libraries in front."""
    tests = str(Path(__file__).parents[1])
    # An address sanitizer, or whatever else is in front, stays there.
    front = [*map(str, libraries), os.environ.get("LD_PRELOAD", "")]
    return {**os.environ, "LD_PRELOAD": " ".join(front).strip(), "PYTHONPATH": tests}


def interpose(folder: Path, fault: Fault, *, log: int = -1, exchange: bool = True) -> None:
    """From here on this process has the fault; the calls go to the descriptor ``log``."""
    _function()(
        os.fsencode(folder), log, fault.at, fault.signal, fault.error, fault.space, int(exchange)
    )


@cache
def _function() -> ctypes._NamedFuncPointer:
    try:
        function = ctypes.CDLL(None).interpose
    except AttributeError:
        sys.exit("this process runs without LD_PRELOAD=interposed.so")
    wide = ctypes.c_long
    function.argtypes = (ctypes.c_char_p, wide, wide, wide, wide, ctypes.c_longlong, wide)
    function.restype = None
    return function
