"""Digests of checkpoints and of specbuild's own sources: what identifies a cached engine."""

from __future__ import annotations

import glob
import json
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import xxhash

from specbuild.builder.durable import replace_bytes
from specbuild.builder.progress import Progress, SilentProgress
from specbuild.cli.model.reference import GGUF_SUFFIX

# A build reads no other files of a checkpoint directory.
_READ = (".safetensors", ".json", ".jinja")
_PACKAGES = ("specbuild.builder", "specbuild.plugins_cuda", "specbuild.runtime")
_SOURCES = (".py", ".cu", ".cuh", ".json")
_BLOCK_BYTES = 8 << 20
# Files of fewer bytes are read within a second.
_SHOWN_BYTES = 1 << 30
# A file that was just written may change again within one tick of the file system's clock.
_SETTLED_S = 2.0


class FileDigests:
    """Digests of files, remembered in ``index`` by path, size and modification time.

    A checkpoint of 60 GB is read once for its digest, not at every start.
    """

    def __init__(self, index: Path, progress: Progress | None = None) -> None:
        self._index = index
        self._progress = SilentProgress() if progress is None else progress
        self._entries = _read_index(index)
        self._changed = False

    def of_checkpoint(self, path: Path) -> str:
        """Return the digest of a directory's files by name, or of a GGUF model's files."""
        digest, files = xxhash.xxh3_128(), checkpoint_files(path)
        unread = sum(file.stat().st_size for file in files if self._remembered(file) is None)
        if unread >= _SHOWN_BYTES:
            self._progress.start(f"reading {path.name} for its digest", unread, "B")
        for file in files:
            digest.update(f"{file.name}\0{self.of_file(file)}\n".encode())
        self._save()
        return digest.hexdigest()

    def of_file(self, file: Path) -> str:
        """Return the digest of what one file holds."""
        remembered, stat = self._remembered(file), file.stat()
        if remembered is not None:
            return remembered
        digest = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                self._progress.advance(len(block))
        if time.time() - stat.st_mtime > _SETTLED_S:
            entry = [stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
            self._entries[str(file.resolve())] = entry
            self._changed = True
        return digest.hexdigest()

    def _remembered(self, file: Path) -> str | None:
        """Return the stored digest of a file that has not changed since it was read."""
        stat, entry = file.stat(), self._entries.get(str(file.resolve()))
        is_same = entry is not None and entry[:2] == [stat.st_size, stat.st_mtime_ns]
        return str(entry[2]) if entry is not None and is_same else None

    def _save(self) -> None:
        if self._changed:
            missing = [key for key in self._entries if not Path(key).exists()]
            for key in missing:
                del self._entries[key]
            replace_bytes(self._index, json.dumps(self._entries).encode())
            self._changed = False


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint that a build reads, in the order of their names."""
    if path.is_file():
        stem = path.name.partition("-00001-of-")[0]
        parts = path.parent.glob(f"{glob.escape(stem)}-*-of-*{GGUF_SUFFIX}")
        return sorted(parts) if stem != path.name else [path]
    return sorted(f for f in path.iterdir() if f.suffix in _READ and f.is_file())


def sources_digest() -> str:
    """Return the digest of specbuild's sources: the version alone misses changes of a checkout."""
    digest = xxhash.xxh3_128()
    for folder in _package_folders():
        for file in sorted(f for f in folder.rglob("*") if f.suffix in _SOURCES):
            digest.update(f"{file.relative_to(folder)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _package_folders() -> Iterable[Path]:
    for name in _PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        yield from map(Path, spec.submodule_search_locations or ())


def _read_index(index: Path) -> dict[str, list[object]]:
    """Return the stored digests; none if the file is missing or damaged."""
    try:
        data = json.loads(index.read_bytes())
    except (OSError, ValueError):
        return {}
    entries = data.items() if isinstance(data, dict) else ()
    return {key: value for key, value in entries if isinstance(value, list) and len(value) == 3}
