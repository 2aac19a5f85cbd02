"""The environment variables that specbuild reads. Nothing outside of this file reads any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(variables: Mapping[str, str] | None = None) -> Path | None:
    """Where measured cost tables are kept between runs.

    ``SPECBUILD_CACHE_DIR``, else ``specbuild`` below ``XDG_CACHE_HOME``, else below ``~/.cache``;
    None for a user who has no home.
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
