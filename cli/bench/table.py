"""The report of ``bench sweep`` as text: lines during the measurement, tables at the end."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from specbuild.cli.anatomy.tables import anatomy_tables
from specbuild.cli.bench.report import Decoding, KernelTime, Load, Phase, SweepReport
from specbuild.cli.tables.run_table import milliseconds
from specbuild.cli.terminal.console import fact_table, size_text

_NONE = "–"


def sweep_tables(report: SweepReport) -> Group:
    """Return all measurements."""
    parts: list[Table | Group | str] = [
        f"{report.gpu}; streaming read {_rate(report.ceiling_bytes_per_s)}"
    ]
    if report.phases:
        parts.append(_phases_table(report.phases))
    if report.kernels:
        parts.append(_kernels_table(report.kernels))
    if report.decoding:
        parts.append(_decoding_table(report.decoding))
    if report.load is not None:
        parts.append(_load_table(report.load))
    parts += [anatomy_tables(step) for step in report.anatomies]
    parts += [f"skipped: {reason}" for reason in report.left_out]
    return Group(*parts)


def phase_line(phase: Phase) -> str:
    """Return one line, printed while others are still measured."""
    return (
        f"{phase.sweep}: {phase.name}, batch {phase.batch}, context {phase.context:.0f}: "
        f"{microseconds(phase.time_s)}, {_rate(phase.bytes_per_s)}, "
        f"{_percent(phase.share_of_ceiling)} of the streaming read"
    )


def decoding_line(found: Decoding) -> str:
    """Return the line of a decoding run."""
    return (
        f"spec: batch {found.batch}, {found.draft}: {found.tokens_per_s:.0f} tokens/s, "
        f"{found.mean_acceptance_length:.2f} tokens/step, "
        f"tokens {'equal' if found.same_tokens else 'DIFFER'}"
    )


def load_line(found: Load) -> str:
    """Return the line of loading."""
    times = ", ".join(f"{time_s:.2f}" for time_s in found.first_token_s) or _NONE
    return f"load: {found.load_s:.2f} s; new processes to the first token: {times} s"


def microseconds(time_s: float) -> str:
    """Return a time such as ``1419.2 µs``."""
    return f"{time_s * 1e6:.1f} µs"


def _phases_table(phases: tuple[Phase, ...]) -> Table:
    table = Table()
    table.add_column("phase", style="bold", overflow="fold")
    for column in (
        "batch", "context", "rows", "time, µs", "MB", "experts", "TB/s", "of read", "TFLOP/s",
        "tokens/s", "idle, µs",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for phase in phases:
        table.add_row(
            f"{phase.sweep}: {phase.name}",
            str(phase.batch),
            f"{phase.context:.0f}",
            str(phase.rows),
            f"{phase.time_s * 1e6:.1f}",
            f"{phase.bytes_total / 1e6:.1f}",
            f"{phase.experts:.1f}" if phase.experts_measured else f"~{phase.experts:.1f}",
            _tera(phase.bytes_per_s, 2),
            _percent(phase.share_of_ceiling),
            _tera(phase.operations_per_s, 1),
            _NONE if phase.tokens_per_s is None else f"{phase.tokens_per_s:.0f}",
            _NONE if phase.idle_s is None else f"{phase.idle_s * 1e6:.1f}",
        )
    return table


def _kernels_table(rows: tuple[KernelTime, ...]) -> Table:
    table = Table()
    table.add_column("step", style="bold", overflow="fold")
    table.add_column("kernel", overflow="fold")
    for column in ("launches", "µs", "µs each"):
        table.add_column(column, justify="right")
    for row in rows:
        each_s = row.added_s / row.launches
        times = [f"{time_s * 1e6:.2f}" for time_s in (row.added_s, each_s)]
        table.add_row(f"{row.step}, batch {row.batch}", row.kernel, str(row.launches), *times)
    return table


def _decoding_table(rows: tuple[Decoding, ...]) -> Table:
    table = Table()
    table.add_column("batch", style="bold", justify="right")
    table.add_column("draft", overflow="fold")
    for column in ("tokens/s", "ratio", "incl. prefill", "tokens/step", "TTFT", "same tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            row.draft,
            f"{row.tokens_per_s:.0f}",
            f"{row.ratio:.2f}",
            f"{row.with_prompts_tokens_per_s:.0f}",
            f"{row.mean_acceptance_length:.2f}",
            milliseconds(row.ttft_s),
            "yes" if row.same_tokens else "NO",
        )
    return table


def _load_table(load: Load) -> Table:
    table = fact_table("load")
    table.add_row("load time", f"{load.load_s:.2f} s")
    times = ", ".join(f"{time_s:.2f} s" for time_s in load.first_token_s)
    table.add_row("new process to first token", times or _NONE)
    table.add_row("weights", size_text(load.weights_bytes))
    table.add_row("caches", size_text(load.cache_bytes))
    table.add_row("other device memory", size_text(load.beyond_bytes))
    table.add_row("used before, with CUDA context", size_text(load.context_bytes))
    return table


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f} %"


def _tera(amount_per_s: float | None, places: int) -> str:
    return _NONE if amount_per_s is None else f"{amount_per_s / 1e12:.{places}f}"


def _rate(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e12:.2f} TB/s"
