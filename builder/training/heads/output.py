"""The files of a training of new heads: report and plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.builder.svg import save_svg
from specbuild.builder.training.heads.estimate import TrainingEstimate
from specbuild.builder.training.heads.run import HeadPoint
from specbuild.builder.training.output import PLOT_FILE, REPORT_FILE, write_json
from specbuild.runtime.engine_dir.strict_json import to_json


@dataclass(frozen=True)
class HeadReport:
    """The result of a training; with ``finished`` False its time limit stopped it.

    ``perplexities`` of ``held_out_tokens`` predictions are those of the original model and of the
    model with new heads, by name. They are empty without held-out text.
    """

    finished: bool
    steps: int
    plan: TrainingEstimate
    training_tokens: int
    held_out_tokens: int
    perplexities: dict[str, float]
    losses: tuple[HeadPoint, ...]
    options: dict[str, Any]


def write_head_report(folder: Path, report: HeadReport) -> None:
    """Write the report and the plot of its losses."""
    write_json(folder / REPORT_FILE, to_json(report))
    plot_terms(folder / PLOT_FILE, report)


def plot_terms(file: Path, report: HeadReport) -> None:
    """Plot every term by step, and perplexities if they were measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for name in sorted({name for point in report.losses for name in point.terms}):
        points = [point for point in report.losses if name in point.terms]
        left.plot([p.step for p in points], [p.terms[name] for p in points], label=name)
    left.set(xlabel="training step", ylabel="loss", title="Loss by term", yscale="log")
    left.legend()
    if report.perplexities:
        bars = right.bar(list(report.perplexities), list(report.perplexities.values()))
        right.bar_label(bars, fmt="%.3f")
        right.set(ylabel="perplexity", title="Held out")
    else:
        right.set_axis_off()
    save_svg(figure, file)
