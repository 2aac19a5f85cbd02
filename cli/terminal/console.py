"""The two rich consoles: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from specbuild.cli.terminal.visible_text import visible
from specbuild.runtime.engine_dir.strict_json import to_json

# The width of a file or pipe without COLUMNS, in which tables of sweeps are legible.
_FILE_COLUMNS = 200


class _VisibleConsole(Console):
    """Escapes control characters, before widths are computed if possible, else on writing."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def say(text: str, *, to: TextIO | None = None) -> None:
    """Print a line of text, on standard output by default."""
    print(visible(text), file=sys.stdout if to is None else to)


def plain_console(file: TextIO) -> Console:
    """Return a console that does not interpret markup: names and paths may have brackets."""
    bounded = file.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _VisibleConsole(
        file=file, highlight=False, markup=False, width=None if bounded else _FILE_COLUMNS
    )


def output() -> Console:
    """Return the console of standard output."""
    return plain_console(sys.stdout)


def messages() -> Console:
    """Return the console of standard error: progress, warnings, tables that accompany a result."""
    return plain_console(sys.stderr)


def json_line(record: Any) -> str:
    """Return a dataclass or plain value as one line of JSON."""
    return json.dumps(to_json(record), allow_nan=False)


def fact_table(title: str) -> Table:
    """Return an empty table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def size_text(size_bytes: int) -> str:
    """Return a size in binary units: ``1536`` gives ``1.5 KiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
