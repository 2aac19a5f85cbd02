"""Writes figures as files, in colours that are readable on light and dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Text and axes have about the same contrast to white and to dark pages of browsers.
GREY = "#747c86"
SERIES = ("#1391a0", "#cf6a1f", "#8a63d2", "#4d9a2a", "#c2407f", "#8c7a10")
_DEFAULT_TEXT = ("black", "k", "#000000")


def save_svg(figure: Any, file: Path) -> None:
    """Write a figure without a background: black text, axes and frames become grey.

    The same figure gives the same bytes: a fixed salt, no date and no creator.
    """
    import matplotlib as mpl

    for axes in figure.axes:
        axes.tick_params(colors=GREY, which="both")
        for spine in axes.spines.values():
            spine.set_edgecolor(GREY)
    for text in figure.findobj(mpl.text.Text):
        if text.get_color() in _DEFAULT_TEXT:
            text.set_color(GREY)
    for legend in figure.findobj(mpl.legend.Legend):
        legend.get_frame().set_alpha(0)
    with mpl.rc_context({"svg.hashsalt": "specbuild"}):
        metadata = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
