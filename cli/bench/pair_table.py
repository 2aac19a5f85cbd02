"""The table of ``bench``: speed with and without a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbuild.cli.tables.dsa_text import dsa_text

if TYPE_CHECKING:
    from rich.table import Table

    from specbuild.cli.bench.pairs import BenchReport, Pair, SetReport


def bench_table(report: BenchReport) -> Table:
    """Return a table with one column per prompt set."""
    from rich.table import Table

    from specbuild.cli.bench.pairs import set_title
    from specbuild.cli.tables.run_table import histogram_text, milliseconds

    table = Table()
    table.add_column("prompts", style="bold")
    for entry in report.sets:
        table.add_column(set_title(entry, report), justify="right", overflow="fold")
    sets = report.sets
    without = [_decimals(entry.without_draft_tokens_per_s, 1) for entry in sets]
    table.add_row("without draft, tokens/s", *without)
    table.add_row(
        "with draft, tokens/s", *(_decimals(entry.with_draft_tokens_per_s, 1) for entry in sets)
    )
    table.add_row("ratio", *(_decimals(entry.ratio, 2) for entry in sets))
    table.add_row("tokens/step", *(_decimals(entry.mean_acceptance_length, 2) for entry in sets))
    if report.against_dtype is not None:
        table.add_row(
            f"tokens/step with a {report.against_dtype} draft",
            *(_decimals(entry.acceptance_length_against, 2) for entry in sets),
        )
        table.add_row("tokens/step lost", *map(_acceptance_lost, sets))
    table.add_row(
        "accepted draft tokens: steps",
        *(histogram_text(entry.acceptance_histogram) for entry in sets),
    )
    table.add_row(
        "TTFT without draft", *(milliseconds(entry.ttft_without_draft_s) for entry in sets)
    )
    table.add_row("TTFT with draft", *(milliseconds(entry.ttft_with_draft_s) for entry in sets))
    table.add_row("same output", *(f"{entry.same_output} of {len(entry.pairs)}" for entry in sets))
    if any(pair.specpv for entry in sets for pair in entry.pairs):
        table.add_row("SpecPV (lossy)", *(specpv_total(entry.pairs) for entry in sets))
    if any(pair.dsa for entry in sets for pair in entry.pairs):
        rows = (dsa_text([pair.dsa for pair in entry.pairs]) for entry in sets)
        table.add_row("DSA (lossy)", *rows)
    return table


def _acceptance_lost(entry: SetReport) -> str:
    length, other_length = entry.mean_acceptance_length, entry.acceptance_length_against
    if length is None or other_length is None:
        return "–"
    return f"{other_length - length:.2f} ({100 * (1 - length / other_length):.1f} %)"


def specpv_total(pairs: Sequence[Pair]) -> str:
    """Steps and agreement over all pairs, and the worst refresh interval."""
    stats = [pair.specpv for pair in pairs if pair.specpv is not None]
    partial, full = sum(s.partial_steps for s in stats), sum(s.full_steps for s in stats)
    text = f"{partial} partial, {full} full steps"
    tokens = sum(s.rechecked_tokens for s in stats)
    if tokens:
        agreed = sum(s.agreed_tokens for s in stats)
        worst = min(share for s in stats for share in s.agreement_per_interval)
        text += f"; {100 * agreed / tokens:.1f} % agree, {100 * worst:.1f} % in the worst interval"
    failures = sum(s.invariant_failures for s in stats)
    return text + (f"; {failures} internal checks failed" if failures else "")


def _decimals(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"
