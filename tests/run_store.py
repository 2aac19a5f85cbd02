"""The folder of a test run: checkpoints and engines that all of its processes read.

Data that depend only on sources, and may outlive the run, are in ``content_store``.
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
    """Keep the files in the base folder of the run and of all its workers."""
    base = factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shared"
    folder.mkdir(exist_ok=True)
    _FOLDERS[:] = [folder]


def shared_folder() -> Path:
    """Return the folder; outside of pytest it belongs to this process."""
    return _FOLDERS[0] if _FOLDERS else Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="specbuild-tests-")


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the file or folder that ``make`` wrote under this name in one of the processes.

    ``make`` gets a path that does not exist. Readers must not write to it.
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
