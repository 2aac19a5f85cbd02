"""Stores measured cost tables between runs, one file per engine and kind of machine."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.engine_dir.regular_file import read_regular
from specbuild.runtime.engine_dir.strict_json import from_json, parsed, to_json
from specbuild.runtime.errors import SpecbuildError

# Part of the file name, so that tables of another measuring method are not read.
_METHOD = "least of several whole steps"
# A table has a dozen numbers.
_MAX_BYTES = 64 << 10
_MAX_COST_S = 3600.0
# Temporary files older than this are removed.
_ABANDONED_S = 3600.0


def cache_path(directory: Path | None, *key: object) -> Path | None:
    """Return the file for this manifest, machine, thread count and library version."""
    if directory is None:
        return None
    digest = hashlib.sha256("\n".join(map(str, (_METHOD, *key))).encode()).hexdigest()
    return directory / f"cost-{digest[:32]}.json"


def load_or_measure(path: Path | None, measure: Callable[[], CostTable]) -> tuple[CostTable, str]:
    """Read the cost table at ``path``, or measure and store it. Return it with its origin.

    An uncertain table is measured again, and the shorter of both times is stored. A file without a
    valid table is replaced. If the directory is not writable, the next start measures again.
    """
    stored = None if path is None else _read(path)
    if stored is not None and stored.sure:
        return stored, "from an earlier run"
    table = measure()
    if stored is not None:
        table = table.least(stored)
    origin = "measured now" if table.sure else "measured now, while other processes ran"
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(to_json(table)))
        except OSError:
            return table, f"{origin}; {path.parent} cannot be written"
    return table, origin


def _write(path: Path, text: str) -> None:
    """Write a file atomically, since several processes may measure at the same time.

    Also remove temporary files of processes that were killed.
    """
    for leftover in path.parent.glob("cost-*.tmp"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _ABANDONED_S:
                leftover.unlink()
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _read(path: Path) -> CostTable | None:
    try:
        data = read_regular(path.parent, path.name, most_bytes=_MAX_BYTES)
        table = from_json(CostTable, parsed(data), path.name)
    except (OSError, ValueError, SpecbuildError):
        return None
    rows, times = table.target_rows, (*table.target_s, *table.draft_s)
    is_valid = (
        len(rows) == len(table.target_s) > 0
        and rows == tuple(sorted(set(rows)))
        and rows[0] >= 1
        and all(0 < t < _MAX_COST_S for t in times)
        and 0 <= table.row_s < _MAX_COST_S
    )
    return table if is_valid else None
