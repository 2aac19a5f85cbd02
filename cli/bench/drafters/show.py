"""Table and chart of ``bench drafters``."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from specbuild.builder.svg import GREY, SERIES, save_svg
from specbuild.cli.bench.drafters.report import DraftersReport
from specbuild.cli.tables.run_table import milliseconds

_COLOURS = (GREY, *SERIES)


def drafters_table(report: DraftersReport) -> Table:
    """Return a table with one row per batch, context and drafter."""
    title = f"{report.new_tokens} greedy tokens of {report.text}, medians of {report.rounds} rounds"
    table = Table(title=title, title_justify="left")
    for name in ("batch", "context"):
        table.add_column(name, justify="right")
    table.add_column("drafter", style="bold")
    for name in ("tokens/step", "draft", "verify", "tokens/s", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("same output")
    place = None
    for row in report.rows:
        if place is not None and place != (row.batch, row.context):
            table.add_section()
        place = (row.batch, row.context)
        times = ("–" if t is None else milliseconds(t) for t in (row.draft_s, row.verify_s))
        table.add_row(
            str(row.batch),
            str(row.context),
            row.drafter,
            f"{row.tokens_per_step:.2f}",
            *times,
            f"{row.tokens_per_s:.1f}",
            f"{row.ratio:.2f}",
            "yes" if row.same_output else "no",
        )
    return table


def plot_drafters(report: DraftersReport, file: Path) -> None:
    """Write an SVG of speed by context, a panel a batch; the same report gives the same bytes."""
    from matplotlib.figure import Figure

    batches = report.batches
    figure = Figure(figsize=(1 + 4 * len(batches), 3.6), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        for number, name in enumerate(report.drafters):
            rows = [r for r in report.rows if (r.batch, r.drafter) == (batch, name)]
            style = {"marker": "o", "label": name, "color": _COLOURS[number % len(_COLOURS)]}
            axes.plot([r.context for r in rows], [r.tokens_per_s for r in rows], **style)
        axes.set_title("1 sequence" if batch == 1 else f"{batch} sequences")
        axes.set_xlabel("context (tokens)")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("tokens/s")
    panels[0].legend()
    save_svg(figure, file)
