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

# Columns of a file or pipe, where COLUMNS does not say: a table of a sweep is legible there.
_FILE_COLUMNS = 200


class _VisibleConsole(Console):
    """Escapes control characters, before widths are measured where it can, else when it writes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def say(text: str, *, to: TextIO | None = None) -> None:
    """A line of text, on standard output where nothing else is said."""
    print(visible(text), file=sys.stdout if to is None else to)


def plain_console(file: TextIO) -> Console:
    """A console that takes text as it is: names and paths may hold brackets."""
    bounded = file.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _VisibleConsole(
        file=file, highlight=False, markup=False, width=None if bounded else _FILE_COLUMNS
    )


def output() -> Console:
    """Standard output."""
    return plain_console(sys.stdout)


def messages() -> Console:
    """Standard error: progress, warnings, tables that accompany a result."""
    return plain_console(sys.stderr)


def json_line(record: Any) -> str:
    """A dataclass or plain value as one line of JSON."""
    return json.dumps(to_json(record), allow_nan=False)


def fact_table(title: str) -> Table:
    """An empty table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def size_text(size_bytes: int) -> str:
    """A size as people read it: ``1536`` gives ``1.5 KiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
