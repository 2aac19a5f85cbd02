"""Figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_svg(figure: Any, file: Path) -> None:
    """Writes a figure; the same figure gives the same bytes: a fixed salt, no date and no maker."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "specbuild"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
