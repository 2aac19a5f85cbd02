"""The chart of ``specbuild compare``: KL divergence by position."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.svg import SERIES, save_svg
from specbuild.cli.compare.report import Comparison


def plot(comparison: Comparison, file: Path) -> None:
    """Write an SVG; the same comparison gives the same bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    middle = [(entry.first + entry.last) / 2 for entry in comparison.by_position]
    axes.plot(middle, [e.divergence for e in comparison.by_position], marker="o", color=SERIES[0])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("KL divergence (nats/token)")
    axes.set_ylim(bottom=0)
    fidelity = comparison.fidelity
    axes.set_title(
        f"perplexity ×{fidelity.perplexity_ratio:.4f}, "
        f"{100 * fidelity.agreement:.2f} % same most likely token",
        fontsize=10,
    )
    save_svg(figure, file)
