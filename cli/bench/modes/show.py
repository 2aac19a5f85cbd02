"""Tables and chart of ``bench modes``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group
from rich.table import Table

from specbuild.builder.svg import GREY, SERIES, save_svg
from specbuild.cli.bench.modes.report import ModeRow, ModesReport
from specbuild.cli.tables.run_table import milliseconds
from specbuild.cli.terminal.console import size_text

_COLOURS = (GREY, *SERIES)


def modes_tables(report: ModesReport) -> Group:
    """Return one table per context with a column per mode, then the size of each engine."""
    return Group(*(_context(report, c) for c in report.contexts), _engines(report))


def _context(report: ModesReport, context: int) -> Table:
    table = Table(title=f"after {context} tokens", title_justify="left")
    table.add_column("", style="bold")
    for mode in report.modes:
        table.add_column(mode.title, justify="right")
    rows = [report.row(mode.mode, context) for mode in report.modes]

    def line(name: str, text: Callable[[ModeRow], str]) -> None:
        table.add_row(name, *map(text, rows))

    line("tokens/s", lambda row: f"{row.tokens_per_s:.1f}")
    line(f"speedup over {report.modes[0].title}", lambda row: f"{row.over_first:.2f}")
    line("tokens/step", lambda row: f"{row.tokens_per_step:.2f}")
    line("TTFT", lambda row: milliseconds(row.ttft_s))
    line("perplexity", lambda row: f"{row.perplexity:.4f}")
    line("same most likely token", lambda row: f"{100 * row.agreement:.2f} %")
    return table


def _engines(report: ModesReport) -> Table:
    table = Table(title="engines", title_justify="left")
    table.add_column("", style="bold")
    for mode in report.modes:
        table.add_column(mode.title, justify="right")
    table.add_row(
        "cache bytes per token", *(f"{m.cache_bytes_per_token:.0f}" for m in report.modes)
    )
    table.add_row("weights", *(size_text(m.weights_bytes) for m in report.modes))
    return table


def plot_modes(report: ModesReport, file: Path) -> None:
    """Write an SVG of speed and perplexity by context; the same report gives the same bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, quality = figure.subplots(1, 2)
    for number, mode in enumerate(report.modes):
        rows = [report.row(mode.mode, context) for context in report.contexts]
        style = {"marker": "o", "label": mode.title, "color": _COLOURS[number % len(_COLOURS)]}
        speed.plot(report.contexts, [row.tokens_per_s for row in rows], **style)
        quality.plot(report.contexts, [row.perplexity for row in rows], **style)
    speed.set_ylabel("tokens/s")
    speed.set_ylim(bottom=0)
    quality.set_ylabel("perplexity")
    for axes in (speed, quality):
        axes.set_xlabel("context (tokens)")
    speed.legend()
    save_svg(figure, file)
