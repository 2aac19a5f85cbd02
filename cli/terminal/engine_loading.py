"""Loads an engine as every command does: with this user's cache of cost tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.cli.terminal.environment import cache_directory

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine


def load_engine(
    path: Path,
    *,
    threads: int | None = None,
    verify_key: Path | None = None,
    pin: str | None = None,
    device: str | None = None,
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
    )
