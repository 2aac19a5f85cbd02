"""The chart of ``bench``: speed and accepted draft tokens of each prompt set."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.svg import save_svg
from specbuild.cli.bench.pairs import BenchReport


def plot(report: BenchReport, file: Path) -> None:
    """Write an SVG; the same report gives the same bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, acceptance = figure.subplots(1, 2)
    places = range(len(report.sets))
    plain = [entry.without_draft_tokens_per_s for entry in report.sets]
    drafted = [entry.with_draft_tokens_per_s or 0.0 for entry in report.sets]
    speed.bar([place - 0.2 for place in places], plain, 0.4, label="without draft", color="#9aa5b1")
    speed.bar([place + 0.2 for place in places], drafted, 0.4, label="with draft", color="#0e7c86")
    for place, entry in zip(places, report.sets, strict=True):
        if entry.ratio is not None:
            speed.text(place + 0.2, drafted[place], f"{entry.ratio:.2f}×", ha="center", va="bottom")
    speed.set_xticks(list(places), [entry.name for entry in report.sets])
    speed.set_ylabel("tokens/s (median)")
    speed.margins(y=0.25)
    speed.legend()
    for entry in report.sets:
        steps = sum(entry.acceptance_histogram)
        shares = [count / steps for count in entry.acceptance_histogram] if steps else []
        acceptance.plot(range(len(shares)), shares, marker="o", label=entry.name)
    acceptance.set_xlabel("accepted draft tokens per step")
    acceptance.set_ylabel("share of steps")
    acceptance.set_ylim(bottom=0)
    acceptance.xaxis.get_major_locator().set_params(integer=True)
    if any(entry.acceptance_histogram for entry in report.sets):
        acceptance.legend()
    save_svg(figure, file)
