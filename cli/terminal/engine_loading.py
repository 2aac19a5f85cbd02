"""Loads an engine as every command does: with this user's cache of cost tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.cli.terminal.environment import cache_directory

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine, GenerationConfig

# A step that is in flight ends first.
_ABORT_TIMEOUT_S = 10.0


def load_engine(
    path: Path,
    *,
    threads: int | None = None,
    verify_key: Path | None = None,
    pin: str | None = None,
    device: str | None = None,
    generation_config: GenerationConfig = "auto",
) -> Engine:
    """The engine at ``path``, of this origin; raises EngineFileError or UnsupportedHereError."""
    from specbuild.runtime.engine import Engine

    return Engine.load(
        path,
        device,
        threads,
        cache_dir=cache_directory(),
        verify_key=verify_key,
        pin=pin,
        generation_config=generation_config,
    )


@contextmanager
def traced(engine: Engine, file: Path | None) -> Iterator[None]:
    """The engine's pages are traced to ``file``; RequestError where it cannot be written.

    What still runs at the end is aborted, so that its last lines are there too.
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
