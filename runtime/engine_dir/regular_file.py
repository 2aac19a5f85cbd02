"""Opens regular files only, without following links and without blocking."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

# A FIFO without a writer, or a device, must not block the open call.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_REASONS = {
    errno.ELOOP: "it is a symbolic link",
    errno.ENOTDIR: "a folder of it is a symbolic link, or none",
    errno.ENXIO: "it is no regular file",
}


def open_regular(directory: Path, name: str) -> int:
    """Return a descriptor for reading the file ``name``, a path inside ``directory``.

    Only ``directory`` itself may be a link. Raises OSError if there is no such file; its
    ``strerror`` is the reason, as the end of a sentence.
    """
    *folders, last = PurePosixPath(name).parts
    place = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = _open(folder, _READ | os.O_DIRECTORY, place)
            os.close(place)
            place = inner
        descriptor = _open(last, _READ, place)
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", name)
    return descriptor


def read_regular(directory: Path, name: str, *, most_bytes: int) -> bytes:
    """Return the bytes of a file that :func:`open_regular` opens; OSError also if it is larger."""
    with os.fdopen(open_regular(directory, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", name)
        return file.read(size)


def _open(name: str, flags: int, place: int) -> int:
    try:
        return os.open(name, flags, dir_fd=place)
    except OSError as error:
        code = error.errno or errno.EIO
        raise OSError(code, _REASONS.get(code, error.strerror), name) from error
