"""Tables of ``specbuild compare``."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.table import Table

from specbuild.cli.compare.report import Comparison, EngineSide
from specbuild.cli.tables.run_table import milliseconds
from specbuild.cli.terminal.console import fact_table, size_text
from specbuild.runtime.measure.fidelity import Fidelity

_NONE = "–"


def comparison_tables(comparison: Comparison) -> Group:
    """Return size, speed and fidelity of both engines."""
    return Group(
        _sides_table(comparison), _fidelity_table(comparison.fidelity, comparison.judged_from)
    )


def _sides_table(comparison: Comparison) -> Table:
    sides = (comparison.reference, comparison.other)
    table = Table()
    table.add_column("", style="bold")
    table.add_column("reference", justify="right", overflow="fold")
    table.add_column("other", justify="right", overflow="fold")
    table.add_column("ratio", justify="right")

    def row(name: str, text: Callable[[EngineSide], str], ratio: float | None = None) -> None:
        table.add_row(name, *map(text, sides), "" if ratio is None else f"{ratio:.3f}")

    def divided(value: Callable[[EngineSide], float | None]) -> float | None:
        first, second = map(value, sides)
        return second / first if first and second is not None else None

    row("engine", lambda s: s.path)
    row("backend", lambda s: s.backend)
    row("lossy", lambda s: ", ".join(s.lossy) or _NONE)
    row("draft", lambda s: s.draft)
    row("weights", lambda s: size_text(s.weights_bytes), divided(lambda s: s.weights_bytes))
    row(
        "cache bytes per token",
        lambda s: f"{s.cache_bytes_per_token:.0f}",
        divided(lambda s: s.cache_bytes_per_token),
    )
    if comparison.speed_ratio is not None:
        row("tokens/s", lambda s: _decimals(s.tokens_per_s, 1), comparison.speed_ratio)
        row("tokens/step", lambda s: _decimals(s.tokens_per_step, 2), divided(_acceptance))
        row("TTFT", lambda s: milliseconds(s.ttft_s or 0.0), divided(lambda s: s.ttft_s))
    return table


def _fidelity_table(comparison: Fidelity, judged_from: int) -> Table:
    table = fact_table("comparison with the reference")
    skipped = f", after the first {judged_from} of each piece" if judged_from else ""
    table.add_row("evaluated tokens", f"{comparison.tokens}{skipped}")
    table.add_row("perplexity", f"{comparison.perplexity:.4f} → {comparison.perplexity_other:.4f}")
    table.add_row(
        "perplexity ratio",
        f"{comparison.perplexity_ratio:.5f} ± {comparison.perplexity_ratio_error:.5f}",
    )
    table.add_row(
        "KL divergence, nats/token",
        f"mean {comparison.divergence:.2e}, p99 {comparison.divergence_p99:.2e}, "
        f"max {comparison.divergence_max:.2e}",
    )
    table.add_row("same most likely token", f"{100 * comparison.agreement:.2f} %")
    return table


def _acceptance(side: EngineSide) -> float | None:
    return side.tokens_per_step


def _decimals(value: float | None, places: int) -> str:
    return _NONE if value is None else f"{value:.{places}f}"
