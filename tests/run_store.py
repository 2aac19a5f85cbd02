"""The folder of a test run: checkpoints and engines that all of its processes read.

What depends on sources alone, and may outlive the run, is in ``content_store``.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

_FOLDERS: list[Path] = []


def use_folder_of(factory: pytest.TempPathFactory) -> None:
    """Keep the files in the run's base folder: with pytest-xdist, that of all its workers."""
    base = factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shared"
    folder.mkdir(exist_ok=True)
    _FOLDERS[:] = [folder]


def shared_folder() -> Path:
    """The folder; outside of pytest this process's own."""
    return _FOLDERS[0] if _FOLDERS else Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="specbuild-tests-")


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder that ``make`` wrote under this name, in whichever process came first.

    ``make`` gets a path that does not exist. Whoever reads must not write.
    """
    path = shared_folder() / name
    if not path.exists():
        with (shared_folder() / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = shared_folder() / f"{name}.unfinished"
                make(unfinished)
                unfinished.rename(path)
    return path
