"""Writes files that survive a power failure, and replaces folders atomically."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RETIRED = "-old"


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space(folder: Path) -> tuple[Path, int]:
    """Return ``folder``, or its nearest parent that exists, and the free bytes of its disk."""
    while not folder.exists():
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free


def write_bytes(path: Path, data: bytes) -> None:
    """Write and sync one file, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    fsync(path)


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a new file, then rename it to ``path``; creates the folder.

    The path has its old contents until the new file is complete and synced, also if ``write`` or
    the disk fails, whose error is raised. Processes that replace the same file take turns.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(staged_name(file.name))
    with _locked(staged):
        try:
            write(staged)
            fsync(staged)
            staged.replace(file)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
    fsync(file.parent)


@contextmanager
def _locked(staged: Path) -> Iterator[None]:
    """Create a file and lock it against other processes that would write it.

    While a process waits for the lock, its holder renames or removes the file, so the name is
    opened again until it is the name of the locked file.
    """
    while True:
        descriptor = os.open(staged, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # Some network drives have no locks.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_file(descriptor, staged):
                yield
                return
        finally:
            os.close(descriptor)


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def staged_name(name: str) -> str:
    """Return the temporary name of :func:`replace_file`."""
    return f".{name}.new"


def replace_bytes(file: Path, data: bytes) -> None:
    """Replace a file by these bytes, as :func:`replace_file` does."""
    replace_file(file, lambda staged: staged.write_bytes(data))


def fsync_tree(folder: Path) -> None:
    """Sync the entries of a folder and of all folders in it."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            fsync(path)


def staging_folder(output: Path) -> Path:
    """Return a new sibling folder for building ``output``; removes those of killed builds.

    If a killed build had moved the old engine away without a replacement, it gets its name back.
    """
    prefix = f".{output.name}.building-{socket.gethostname()}-"
    for leftover in output.parent.glob(f"{glob.escape(prefix)}*"):
        pid = leftover.name.removeprefix(prefix).partition("-")[0]
        if not pid.isdigit() or _alive(int(pid)):
            continue
        if leftover.name.endswith(_RETIRED) and not output.exists():
            leftover.rename(output)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=output.parent))


def put_in_place(staging: Path, output: Path) -> None:
    """Rename a finished folder to its final name, and remove what had that name.

    If the system can exchange two names atomically, there is always an engine.
    """
    fsync_tree(staging)
    if not output.exists():
        staging.rename(output)
    elif _exchanged(staging, output):
        shutil.rmtree(staging)
    else:
        retired = staging.with_name(f"{staging.name}{_RETIRED}")
        output.rename(retired)
        try:
            staging.rename(output)
        except OSError:
            retired.rename(output)
            raise
        shutil.rmtree(retired)
    fsync(output.parent)


def _exchanged(first: Path, second: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(rename(*names, _RENAME_EXCHANGE) == 0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
