"""The closing table of ``run``: what each request took, and how well its draft did."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from specbuild.cli.tables.dsa_text import dsa_text
from specbuild.runtime.records import RunRecord, SpecPvStats

DETAILED_REQUESTS = 3


def run_table(records: Sequence[RunRecord]) -> Table:
    """Every statistic where the requests are few, one short row a request where they are many."""
    return _detailed(records) if len(records) <= DETAILED_REQUESTS else _compact(records)


def _detailed(records: Sequence[RunRecord]) -> Table:
    table = Table(title="statistics", title_justify="left", show_header=len(records) > 1)
    table.add_column("id", style="bold")
    for record in records:
        table.add_column(record.id, justify="right", overflow="fold")
    stats = [record.stats for record in records]
    table.add_row("prompt tokens", *(str(s.prompt_tokens) for s in stats))
    table.add_row("output tokens", *(str(s.output_tokens) for s in stats))
    table.add_row("ended by", *(record.finish_reason for record in records))
    table.add_row("steps", *(str(s.steps) for s in stats))
    table.add_row("tokens a step", *(f"{s.mean_acceptance_length:.2f}" for s in stats))
    table.add_row("drafts accepted:steps", *(histogram_text(s.acceptance_histogram) for s in stats))
    table.add_row("first token", *(milliseconds(s.ttft_s) for s in stats))
    table.add_row("each further token", *(milliseconds(s.tpot_s) for s in stats))
    table.add_row("tokens/s", *(f"{s.output_tokens_per_s:.1f}" for s in stats))
    if any(s.preemptions or s.paused_steps for s in stats):
        table.add_row("lost its pages", *(f"{s.preemptions} times" for s in stats))
        table.add_row("waited for pages", *(f"{s.paused_steps} steps" for s in stats))
    if any(s.specpv for s in stats):
        table.add_row("SpecPV (lossy)", *(specpv_text(s.specpv) for s in stats))
    if any(s.dsa for s in stats):
        table.add_row("DSA (lossy)", *(dsa_text([s.dsa]) for s in stats))
    return table


def _compact(records: Sequence[RunRecord]) -> Table:
    table = Table(title="statistics", title_justify="left")
    table.add_column("id", overflow="fold")
    for heading in ("prompt", "output", "a step", "first token", "tokens/s"):
        table.add_column(heading, justify="right")
    preempted = any(record.stats.preemptions for record in records)
    if preempted:
        table.add_column("lost pages", justify="right")
    lossy = any(record.stats.specpv for record in records)
    if lossy:
        table.add_column("SpecPV (lossy)")
    sparse = any(record.stats.dsa for record in records)
    if sparse:
        table.add_column("DSA (lossy)")
    table.add_column("ended by")
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
    """Steps by accepted drafts: ``0:12 1:7 2:3``."""
    return " ".join(f"{accepted}:{steps}" for accepted, steps in enumerate(histogram) if steps)


def specpv_text(stats: SpecPvStats | None) -> str:
    """How many steps were partial, and how often their tokens were right."""
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
        text += f", {stats.invariant_failures} invariants failed"
    return text


def milliseconds(time_s: float | None) -> str:
    """A duration for people; a dash where there is none (one token has no time per token)."""
    return "–" if time_s is None else f"{1000 * time_s:.1f} ms"
