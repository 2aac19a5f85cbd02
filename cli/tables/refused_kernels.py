"""Kernels and sizes that gave way to others when an engine was built, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.strict_json import parsed
from specbuild.runtime.errors import EngineFileError

if TYPE_CHECKING:
    from rich.table import Table

REPORT_FILE = "build_report.json"


def refused_kernels(engine: Path, manifest: Manifest) -> tuple[str, ...]:
    """The reasons in the build report, none where it has none. Raises EngineFileError."""
    if REPORT_FILE not in manifest.files:
        return ()
    data = bytes(read_file(engine, manifest, REPORT_FILE))
    try:
        report = parsed(data)
        spilling = (report.get("cuda") or {}).get("left_out", ())
        return tuple(str(entry["reason"]) for entry in (*report.get("refused", ()), *spilling))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineFileError(
            f"{engine}: {REPORT_FILE} is no build report ({error!r}); build the engine again"
        ) from error


def refused_table(reasons: tuple[str, ...]) -> Table:
    """A row for each reason."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("left out")
    for reason in reasons:
        table.add_row("kernel", reason)
    return table
