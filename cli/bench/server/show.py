"""Table and chart of ``bench server``."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from specbuild.builder.svg import GREY, SERIES, save_svg
from specbuild.cli.bench.server.report import LoadReport, Spread

_ROWS = {
    "TTFT": "ttft_s",
    "TPOT": "tpot_s",
    "time between chunks": "gap_s",
    "longest gap per request": "worst_gap_s",
    "total time": "e2e_s",
}
# The offset of each percentile's bar in its row, and its colour.
_BARS = ((-0.25, "p50", SERIES[0]), (0, "p90", GREY), (0.25, "p99", SERIES[1]))


def load_table(report: LoadReport) -> Table:
    """Return times in milliseconds by percentile."""
    table = Table()
    table.add_column("ms", style="bold")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for title, field in _ROWS.items():
        spread: Spread | None = getattr(report, field)
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.worst) if spread else ()
        table.add_row(title, *(f"{1e3 * value:.1f}" for value in values))
    return table


def load_text(report: LoadReport) -> str:
    """Return totals in one sentence, and the errors."""
    how = f"{report.clients} clients" if report.rate is None else f"{report.rate:g} requests/s sent"
    text = (
        f"{report.requests} requests, {how}: {report.output_tokens_per_s:.1f} tokens/s, "
        f"{report.requests_per_s:.2f} requests/s in {report.duration_s:.1f} s"
    )
    return text + (f"; {report.errors} failed: {report.first_error}" if report.errors else "")


def plot_load(report: LoadReport, file: Path) -> None:
    """Write an SVG of the percentiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    distributions = {title: getattr(report, field) for title, field in _ROWS.items()}
    titles = [title for title, spread in distributions.items() if spread is not None]
    for offset, name, color in _BARS:
        values = [1e3 * getattr(distributions[title], name) for title in titles]
        places = [place + offset for place in range(len(titles))]
        axes.barh(places, values, 0.22, label=name, color=color)
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_title(load_text(report), fontsize=9)
    axes.legend()
    save_svg(figure, file)
