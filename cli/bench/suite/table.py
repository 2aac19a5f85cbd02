"""The table of a suite's report."""

from __future__ import annotations

from rich.table import Table

from specbuild.cli.bench.suite.report import SuiteReport


def suite_table(report: SuiteReport) -> Table:
    """Return a table with one row per scenario."""
    table = Table(title=f"{report.suite} on {report.engine}", title_justify="left")
    table.add_column("scenario", style="bold", overflow="fold")
    for column in ("attempts", "tokens/s", "speedup over no draft", "tokens/step"):
        table.add_column(column, justify="right")
    table.add_column("", overflow="fold")
    for scenario in report.scenarios:
        last = scenario.attempts[-1] if scenario.attempts else None
        table.add_row(
            scenario.name,
            str(len(scenario.attempts)),
            f"{scenario.tokens_per_s:.1f}" if last else "–",
            _decimals(None if last is None else last.over_no_draft),
            _decimals(None if last is None else last.tokens_per_step),
            f"{scenario.verdict}{': ' if scenario.reasons else ''}{'; '.join(scenario.reasons)}",
        )
    return table


def _decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
