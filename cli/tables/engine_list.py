"""The engines of the cache as a table."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.table import Table

from specbuild.cli.model.engine_cache import CachedEngine
from specbuild.cli.terminal.console import size_text

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def engine_list(engines: Sequence[CachedEngine]) -> Table:
    """Return one row for each engine: model, backend, draft, size, age, and when it was used."""
    now = time.time()
    table = Table(title="engines", title_justify="left")
    for heading in ("id", "model", "backend", "draft"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "backend"))
    for heading in ("size", "age", "used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for engine in engines:
        table.add_row(
            engine.id,
            engine.model,
            engine.backend,
            engine.draft or "none",
            size_text(engine.size_bytes),
            age_text(now - engine.built),
            age_text(now - engine.used),
        )
    return table


def age_text(seconds: float) -> str:
    """Return an age in its largest unit: 7300 gives ``2 h``."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"
