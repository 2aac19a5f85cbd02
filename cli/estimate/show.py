"""The tables of ``estimate``."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from specbuild.cli.estimate.report import EstimateReport
from specbuild.cli.terminal.console import fact_table

_ROWS = {
    "TTFT": "ttft_s",
    "TPOT": "tpot_s",
    "total time": "e2e_s",
}
# From this share of busy time, waiting times grow with the number of requests.
_SATURATED = 0.98


def estimate_text(report: EstimateReport) -> str:
    """Return the traffic and the result of one engine in a sentence."""
    how = f"{report.rate:g} requests/s" if report.rate else f"{report.clients} clients"
    text = (
        f"{report.engine} on {report.machine}, {how} of {report.prompt_tokens} + "
        f"{report.output_tokens} tokens: {report.output_tokens_per_s:.1f} tokens/s, "
        f"{report.requests_per_s:.2f} requests/s, {100 * report.busy_share:.0f} % utilization"
    )
    if report.rate is not None and report.busy_share > _SATURATED:
        text += "; the request rate exceeds the capacity of one engine"
    return text


def estimate_tables(report: EstimateReport) -> Group:
    """Return times in milliseconds by percentile, and replicas if there are targets."""
    table = Table(title="predicted", title_justify="left")
    table.add_column("ms", style="bold")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for title, field in _ROWS.items():
        spread = getattr(report, field)
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.worst) if spread else ()
        table.add_row(title, *(f"{1e3 * value:.1f}" for value in values))
    if report.replicas is None:
        return Group(table)
    replicas = report.replicas
    facts = fact_table("replicas for the targets")
    facts.add_row("replicas", str(replicas.count))
    if replicas.gpus > 1:
        facts.add_row("GPUs", f"{replicas.count * replicas.gpus}, {replicas.gpus} per replica")
    facts.add_row("requests/s per replica", f"{replicas.requests_per_s:.3g}")
    facts.add_row("TTFT, p90", f"{1e3 * replicas.ttft_p90_s:.1f} ms")
    if replicas.tpot_p90_s is not None:
        facts.add_row("TPOT, p90", f"{1e3 * replicas.tpot_p90_s:.1f} ms")
    return Group(table, facts)
