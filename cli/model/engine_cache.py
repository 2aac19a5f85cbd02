"""Engines that commands built from checkpoints, kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from specbuild.builder.durable import replace_bytes
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.cli.model.digests import FileDigests, sources_digest
from specbuild.cli.terminal.environment import cache_directory
from specbuild.runtime.engine_dir.manifest import MANIFEST_FILE
from specbuild.runtime.errors import SpecbuildError

# Options that name a path, or do not change an engine.
_NOT_IN_KEY = ("model", "draft", "output", "keep_onnx", "dump_passes", "force", "tactics")
_KEY_CHARACTERS = 12
_MAX_NAME_CHARACTERS = 48


@dataclass(frozen=True)
class CachedEngine:
    """An engine of the cache. Times are seconds since 1970; ``build_s`` is the build's duration."""

    name: str
    model: str
    backend: str
    draft: str | None
    size_bytes: int
    built: float
    build_s: float
    used: float

    @property
    def id(self) -> str:
        """The digest at the end of the name."""
        return self.name.rpartition("-")[2]

    def is_named(self, text: str) -> bool:
        """Return whether ``text`` is the engine's id or a prefix of it, its name or its model."""
        return text in (self.name, self.model) or (bool(text) and self.id.startswith(text))


@dataclass(frozen=True)
class _Record:
    """The record next to an engine; its modification time is the last use of the engine."""

    model: str
    backend: str
    draft: str | None
    built: float
    build_s: float


class EngineCache:
    """A folder of engines, each with ``name.json`` and, during a build, ``name.lock``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> EngineCache:
        """Return the cache in ``SPECBUILD_CACHE_DIR``; SpecbuildError for a user without a home."""
        folder = cache_directory()
        if folder is None:
            raise SpecbuildError(
                "there is no home directory for the cache of engines: set SPECBUILD_CACHE_DIR, or "
                "build with 'specbuild build'"
            )
        return cls(folder / "engines")

    def path(self, name: str) -> Path:
        """Return the directory of an engine."""
        return self.folder / name

    def name_of(self, title: str, options: BuildOptions, progress: Progress | None = None) -> str:
        """Return the engine's name: the model's, and a digest of everything that it depends on.

        These are the contents of the checkpoint and the drafts, the options, the backend and the
        sources of specbuild.
        """
        digests = FileDigests(self.folder.parent / "digests.json", progress)
        drafts = [
            digests.of_checkpoint(path) if path.exists() else str(path) for path in options.drafts
        ]
        tactics = options.kernels.tactics
        key_inputs = {
            "options": {k: str(v) for k, v in options.flat().items() if k not in _NOT_IN_KEY},
            "model": digests.of_checkpoint(options.model),
            "drafts": drafts,
            "tactics": None if tactics is None else digests.of_file(tactics),
            "sources": sources_digest(),
        }
        key = xxhash.xxh3_128_hexdigest(json.dumps(key_inputs, sort_keys=True).encode())
        words = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.")[:_MAX_NAME_CHARACTERS]
        return f"{words or 'model'}-{options.backend}-{key[:_KEY_CHARACTERS]}"

    def holds(self, name: str) -> bool:
        """Whether there is a finished engine of this name."""
        return (self.path(name) / MANIFEST_FILE).exists()

    def touch(self, name: str) -> None:
        """Record that the engine is used now."""
        try:
            os.utime(self._record_file(name))
        except OSError:  # A cache that other users own can still be read.
            return

    def record(self, name: str, *, model: str, options: BuildOptions, build_s: float) -> None:
        """Store the record of a finished engine for ``list``."""
        drafters = [*map(str, options.drafts), *filter(None, [options.drafter])]
        draft = ", ".join(drafters) or None
        record = _Record(model, options.backend, draft, time.time(), build_s)
        replace_bytes(self._record_file(name), json.dumps(asdict(record)).encode())

    @contextmanager
    def locked(self, name: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of one engine; call ``waiting`` if another process holds it.

        The lock ends with the process in any case.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name}.lock"
        has_called = False
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not has_called:
                        waiting()
                        has_called = True
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                # The process that held the lock removed the file, and another may have created a
                # new one.
                if not _is_same_file(descriptor, file):
                    continue
                try:
                    yield
                finally:
                    file.unlink(missing_ok=True)
                return
            finally:
                os.close(descriptor)

    def engines(self) -> list[CachedEngine]:
        """Return every finished engine, most recently used first."""
        entries = [self._entry(file.parent) for file in self.folder.glob(f"*/{MANIFEST_FILE}")]
        return sorted(entries, key=lambda entry: -entry.used)

    def remove(self, name: str) -> None:
        """Delete one engine. Raises SpecbuildError during its build."""

        def refuse() -> None:
            raise SpecbuildError(f"{name} is being built by another process: stop that first")

        with self.locked(name, refuse):
            self._record_file(name).unlink(missing_ok=True)
            shutil.rmtree(self.path(name))

    def _record_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _entry(self, path: Path) -> CachedEngine:
        file = self._record_file(path.name)
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        built = (path / MANIFEST_FILE).stat().st_mtime
        record, used = _Record("unknown", "unknown", None, built, 0.0), built
        try:
            data = json.loads(file.read_bytes())
            record, used = _Record(**{f.name: data[f.name] for f in fields(_Record)}), _mtime(file)
        except (OSError, ValueError, LookupError, TypeError):
            pass  # The process ended between the engine and its record.
        return CachedEngine(path.name, size_bytes=size, used=used, **asdict(record))


def _mtime(file: Path) -> float:
    return file.stat().st_mtime


def _is_same_file(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
