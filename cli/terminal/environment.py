"""The environment variables of specbuild. No other file reads any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(variables: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory of measured cost tables.

    It is ``SPECBUILD_CACHE_DIR``, else ``specbuild`` in ``XDG_CACHE_HOME``, else in ``~/.cache``;
    None for a user without a home.
    """
    variables = os.environ if variables is None else variables
    chosen = variables.get("SPECBUILD_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = variables.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "specbuild"
    except RuntimeError:
        return None
