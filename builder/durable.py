"""Files that survive a power cut once they are said to be written."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes and syncs one file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    fsync(path)
