"""The table of statistics that ``run`` prints at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from specbuild.cli.tables.dsa_text import dsa_text
from specbuild.runtime.records import RunRecord, SpecPvStats

DETAILED_REQUESTS = 3


def run_table(records: Sequence[RunRecord]) -> Table:
    """Return all statistics of few requests, or one short row per request."""
    return _detailed(records) if len(records) <= DETAILED_REQUESTS else _compact(records)


def _detailed(records: Sequence[RunRecord]) -> Table:
    table = Table(title="statistics", title_justify="left", show_header=len(records) > 1)
    table.add_column("id", style="bold")
    for record in records:
        table.add_column(record.id, justify="right", overflow="fold")
    stats = [record.stats for record in records]
    table.add_row("prompt tokens", *(str(s.prompt_tokens) for s in stats))
    table.add_row("output tokens", *(str(s.output_tokens) for s in stats))
    table.add_row("finish reason", *(record.finish_reason for record in records))
    table.add_row("steps", *(str(s.steps) for s in stats))
    if any(s.proposed_tokens for s in stats):
        table.add_row("tokens/step", *(f"{s.mean_acceptance_length:.2f}" for s in stats))
        table.add_row(
            "accepted draft tokens: steps", *(histogram_text(s.acceptance_histogram) for s in stats)
        )
    table.add_row("TTFT", *(milliseconds(s.ttft_s) for s in stats))
    table.add_row("TPOT", *(milliseconds(s.tpot_s) for s in stats))
    table.add_row("tokens/s", *(f"{s.output_tokens_per_s:.1f}" for s in stats))
    if any(s.preemptions or s.paused_steps for s in stats):
        table.add_row("preemptions", *(f"{s.preemptions} times" for s in stats))
        table.add_row("waited for pages", *(f"{s.paused_steps} steps" for s in stats))
    if any(s.specpv for s in stats):
        table.add_row("SpecPV (lossy)", *(specpv_text(s.specpv) for s in stats))
    if any(s.dsa for s in stats):
        table.add_row("DSA (lossy)", *(dsa_text([s.dsa]) for s in stats))
    return table


def _compact(records: Sequence[RunRecord]) -> Table:
    table = Table(title="statistics", title_justify="left")
    table.add_column("id", overflow="fold")
    for heading in ("prompt", "output", "tokens/step", "TTFT", "tokens/s"):
        table.add_column(heading, justify="right")
    preempted = any(record.stats.preemptions for record in records)
    if preempted:
        table.add_column("preemptions", justify="right")
    lossy = any(record.stats.specpv for record in records)
    if lossy:
        table.add_column("SpecPV (lossy)")
    sparse = any(record.stats.dsa for record in records)
    if sparse:
        table.add_column("DSA (lossy)")
    table.add_column("finish reason")
    for record in records:
        stats = record.stats
        table.add_row(
            record.id,
            str(stats.prompt_tokens),
            str(stats.output_tokens),
            f"{stats.mean_acceptance_length:.2f}",
            milliseconds(stats.ttft_s),
            f"{stats.output_tokens_per_s:.1f}",
            *([str(stats.preemptions)] if preempted else []),
            *([specpv_text(stats.specpv)] if lossy else []),
            *([dsa_text([stats.dsa])] if sparse else []),
            record.finish_reason,
        )
    return table


def histogram_text(histogram: Sequence[int]) -> str:
    """Return the number of steps by accepted draft tokens: ``0:12 1:7 2:3``."""
    return " ".join(f"{accepted}:{steps}" for accepted, steps in enumerate(histogram) if steps)


def specpv_text(stats: SpecPvStats | None) -> str:
    """Return the numbers of partial and full steps, and the agreement."""
    if stats is None:
        return "–"
    text = f"{stats.partial_steps} partial, {stats.full_steps} full steps"
    if stats.full_step_reasons:
        text += f" ({', '.join(f'{why}: {n}' for why, n in stats.full_step_reasons.items())})"
    if stats.retrieval_reason is not None:
        text = f"{stats.retrieval_reason}: {text}"
    if stats.agreement is not None:
        text += f", {100 * stats.agreement:.1f} % of {stats.rechecked_tokens} tokens agree"
    if stats.invariant_failures:
        text += f", {stats.invariant_failures} internal checks failed"
    return text


def milliseconds(time_s: float | None) -> str:
    """Return a duration as text; a dash if there is none (one token has no TPOT)."""
    return "–" if time_s is None else f"{1000 * time_s:.1f} ms"
