"""Checks the file of a picture before anything is measured for it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from specbuild.runtime.errors import SpecbuildError

_SUFFIX = ".svg"


def require_plot_place(file: Path | None) -> None:
    """Raise SpecbuildError if ``--plot`` names no file to which an SVG can be written.

    Raises ModuleNotFoundError without the drawing library.
    """
    if file is None:
        return
    if file.suffix != _SUFFIX:
        raise SpecbuildError(f"--plot {file}: pictures are SVG; give a name that ends in {_SUFFIX}")
    if not file.parent.is_dir():
        raise SpecbuildError(f"--plot {file}: {file.parent} is no directory; make it first")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("--plot draws with matplotlib", name="matplotlib")
