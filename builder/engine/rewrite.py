"""Replaces files of an engine atomically: its name always has a complete engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from specbuild.builder.durable import fsync, put_in_place, staging_folder, write_bytes
from specbuild.builder.engine.writer import json_bytes
from specbuild.runtime.engine_dir.features import stored_json
from specbuild.runtime.engine_dir.files import (
    check_sizes,
    file_entry,
    manifest_digest,
    read_manifest,
)
from specbuild.runtime.engine_dir.manifest import MANIFEST_FILE, MANIFEST_HASH_FILE
from specbuild.runtime.errors import SpecbuildError


def rewrite_engine(engine: Path, files: Mapping[str, bytes], removed: Collection[str] = ()) -> None:
    """Write ``files`` and omit ``removed``; the rest, including the weights, is not copied.

    Unchanged files are hard links to the old ones, if the file system supports them. Raises
    SpecbuildError if the directory cannot be written; the engine is then unchanged.
    """
    engine = engine.resolve()
    manifest = read_manifest(engine)
    unchanged = set(manifest.files) - set(files) - set(removed)
    try:
        staging = staging_folder(engine)
    except OSError as error:
        raise SpecbuildError(
            f"{engine.parent} cannot be written ({error.strerror}), where the new engine is put "
            "together; copy the engine to another place"
        ) from error
    try:
        for name in sorted(unchanged):
            _link(engine / name, staging / name)
        for name, data in files.items():
            write_bytes(staging / name, data)
        entries = {name: manifest.files[name] for name in unchanged}
        entries |= {name: file_entry(staging / name, chunked=False) for name in files}
        data = json_bytes(stored_json(replace(manifest, files=dict(sorted(entries.items())))))
        write_bytes(staging / MANIFEST_FILE, data)
        write_bytes(staging / MANIFEST_HASH_FILE, manifest_digest(data).encode())
        check_sizes(staging, read_manifest(staging))
        shutil.copymode(engine, staging)
        put_in_place(staging, engine)
    except OSError as error:
        raise SpecbuildError(
            f"{engine} cannot be rewritten ({error.strerror}); free some space or copy it to "
            "another place"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        fsync(target)
