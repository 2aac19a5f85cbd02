"""A store of test data that outlives a run: compiled kernels, exported graphs, passed cases.

The key of an entry is a digest of all its inputs, so that an entry never becomes outdated. Several
processes may use the store at the same time. A new entry appears by one rename. An entry whose
files do not match their digests is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO

import xxhash

# Another folder than .cache/tests of the checkout.
STORE = "SPECBUILD_TEST_STORE"
ROOT = Path(__file__).parents[1]
MAX_BYTES = 4 << 30
_DIGESTS = "digests.json"


def digest(*parts: str | bytes) -> str:
    """Return the key of an entry with these inputs, in this order."""
    state = sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]


class ContentStore:
    """Entries by kind and key. Each is a folder of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._intact: set[Path] = set()
        for name in ("locks", "unfinished"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        # Held until the process ends: `evict` removes nothing while another process has it.
        self._in_use: IO[str] = (folder / "in-use").open("a")
        fcntl.flock(self._in_use, fcntl.LOCK_SH)

    def close(self) -> None:
        """Allow other processes to evict entries."""
        self._in_use.close()

    def made(self, kind: str, key: str, make: Callable[[Path], object]) -> Path:
        """Return the folder of an entry. ``make`` fills it if no intact one exists."""
        found = self.find(kind, key)
        if found is not None:
            return found
        with (self.folder / "locks" / f"{kind}-{key}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.find(kind, key)
            return self._make(kind, key, make) if found is None else found

    def find(self, kind: str, key: str) -> Path | None:
        """Return the folder of an entry, or None if it is missing or damaged."""
        entry = self.folder / kind / key
        if entry in self._intact:
            return entry
        if not _is_intact(entry):
            return None
        self._intact.add(entry)
        os.utime(entry / _DIGESTS)
        return entry

    def keys(self, kind: str) -> Iterator[str]:
        """Return the keys of all entries of a kind, including damaged ones."""
        folder = self.folder / kind
        return (entry.name for entry in folder.iterdir()) if folder.is_dir() else iter(())

    def _make(self, kind: str, key: str, make: Callable[[Path], object]) -> Path:
        entry = self.folder / kind / key
        unfinished = self.folder / "unfinished" / f"{kind}-{key}-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished)
        digests = {file.name: _file_digest(file) for file in unfinished.iterdir()}
        (unfinished / _DIGESTS).write_text(json.dumps(digests))
        shutil.rmtree(entry, ignore_errors=True)
        entry.parent.mkdir(exist_ok=True)
        unfinished.rename(entry)
        self._intact.add(entry)
        return entry

    def evict(self, max_bytes: int = MAX_BYTES) -> int:
        """Remove the least recently used entries above the limit, and leftovers of killed runs.

        Return the number of removed entries. It is 0 while another process uses the store.
        """
        try:
            fcntl.flock(self._in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._in_use, fcntl.LOCK_SH)
            return 0
        try:
            for name in ("locks", "unfinished"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                (self.folder / name).mkdir()
            return self._evict(max_bytes)
        finally:
            fcntl.flock(self._in_use, fcntl.LOCK_SH)

    def _evict(self, max_bytes: int) -> int:
        entries = []
        for stamp in self.folder.glob(f"*/*/{_DIGESTS}"):
            size = sum(512 * file.stat().st_blocks for file in stamp.parent.iterdir())
            entries.append((stamp.stat().st_mtime_ns, size, stamp.parent))
        total, removed = sum(size for _, size, _ in entries), 0
        for _, size, entry in sorted(entries):
            if total <= max_bytes:
                break
            shutil.rmtree(entry)
            self._intact.discard(entry)
            total, removed = total - size, removed + 1
        return removed


def _is_intact(entry: Path) -> bool:
    try:
        digests = json.loads((entry / _DIGESTS).read_bytes())
        return all(_file_digest(entry / name) == value for name, value in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _file_digest(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


_STORES: list[ContentStore] = []


def use_store(folder: Path) -> None:
    """Use the store in this folder from now on."""
    _STORES[:] = [ContentStore(folder)]


def content_store() -> ContentStore:
    """Return the store of this process: :data:`STORE`, or that of the checkout."""
    return _STORES[0] if _STORES else _default_store()


@cache
def _default_store() -> ContentStore:
    return ContentStore(Path(os.environ.get(STORE) or ROOT / ".cache" / "tests"))
