"""The chart of ``bench``: speed and accepted draft tokens of each prompt set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.builder.svg import GREY, SERIES, save_svg
from specbuild.cli.bench.pairs import BenchReport, set_title


def plot(report: BenchReport, file: Path) -> None:
    """Write an SVG; the same report gives the same bytes."""
    from matplotlib.figure import Figure

    drafted = any(entry.with_draft_tokens_per_s is not None for entry in report.sets)
    figure = Figure(figsize=(9 if drafted else 4.5, 3.6), layout="constrained")
    panels = figure.subplots(1, 1 + drafted, squeeze=False)[0]
    _plot_speed(panels[0], report)
    if drafted:
        _plot_acceptance(panels[1], report)
    save_svg(figure, file)


def _plot_speed(axes: Any, report: BenchReport) -> None:
    for place, entry in enumerate(report.sets):
        bars = [(entry.without_draft_tokens_per_s, "without draft", GREY, "")]
        if entry.with_draft_tokens_per_s is not None:
            gain = "" if entry.ratio is None else f"\n{entry.ratio:.2f}×"
            bars.append((entry.with_draft_tokens_per_s, "with draft", SERIES[0], gain))
        for number, (speed, label, colour, gain) in enumerate(bars):
            x = place + 0.4 * (number - (len(bars) - 1) / 2)
            axes.bar(x, speed, 0.38, label=label if place == 0 else None, color=colour)
            axes.text(x, speed, f"{speed:.0f}{gain}", ha="center", va="bottom")
    axes.set_xticks(
        range(len(report.sets)),
        [set_title(entry, report).replace(", ", "\n") for entry in report.sets],
    )
    axes.set_ylabel("tokens/s (median)")
    axes.set_xlim(-0.7, len(report.sets) - 0.3)
    axes.margins(y=0.4)
    axes.legend(loc="upper left", ncols=2)


def _plot_acceptance(axes: Any, report: BenchReport) -> None:
    for number, entry in enumerate(report.sets):
        steps = sum(entry.acceptance_histogram)
        shares = [100 * count / steps for count in entry.acceptance_histogram] if steps else []
        title = set_title(entry, report)
        colour = SERIES[number % len(SERIES)]
        axes.plot(range(len(shares)), shares, marker="o", label=title, color=colour)
        for accepted, share in enumerate(shares if len(report.sets) == 1 else []):
            place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{share:.0f} %", (accepted, share), **place)
    axes.set_xlabel("accepted draft tokens per step")
    axes.set_ylabel("share of steps (%)")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(report.sets) > 1:
        axes.legend()
