"""Loads an engine with the user's cache of cost tables, for all commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.cli.terminal.console import messages
from specbuild.cli.terminal.environment import cache_directory
from specbuild.cli.terminal.heartbeat import Heartbeat, seconds_text

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.settings import RuntimeSettings

# A step in flight ends first.
_ABORT_TIMEOUT_S = 10.0


def load_engine(path: Path, settings: RuntimeSettings | None = None) -> Engine:
    """Return the engine at ``path``; raises EngineFileError or UnsupportedHereError."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.settings import DEFAULT_SETTINGS

    def text(passed_s: float) -> str:
        return f"loading {path}: {seconds_text(passed_s)}"

    def say(line: str) -> None:
        messages().print(line, soft_wrap=True)

    with Heartbeat(text, say):
        return Engine.load(path, replace(settings or DEFAULT_SETTINGS, cache_dir=cache_directory()))


@contextmanager
def traced(engine: Engine, file: Path | None) -> Iterator[None]:
    """Trace the engine's pages to ``file``; RequestError if it cannot be written.

    Requests that still run at the end are aborted, so that their last lines are included.
    """
    if file is None:
        yield
        return
    from specbuild.runtime.cache.page_trace import PageTrace

    with PageTrace(file) as trace:
        engine.trace_pages(trace)
        try:
            yield
        finally:
            engine.session.abort().wait(_ABORT_TIMEOUT_S)
