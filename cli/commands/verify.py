"""``specbuild verify``: compare an engine with an independent reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.cli.options.shared import Debug, Draft, EngineDirectory, Json

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from specbuild.builder.verify import LosslessRow, VerifyReport, VerifyRow

EXIT_THRESHOLD_FAILED = 1


def verify(
    engine: EngineDirectory,
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Checkpoint directory or GGUF file that the engine was built from.",
        ),
    ],
    draft: Draft = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Compare a CPU engine with its checkpoint, stage by stage, and check losslessness.

    The reference is Hugging Face transformers for the target, and PyTorch for the draft.
    [b]selftest[/b] needs no checkpoint. The exit code is 1 if a threshold is missed.

    \b
    Examples:
    specbuild verify engine --model target
    specbuild verify engine --model model.gguf
    specbuild verify engine --model target --draft draft --json
    """
    from specbuild.builder.verify import verify_engine
    from specbuild.cli.terminal import console
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        report = verify_engine(engine, model, draft, progress)
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(verify_tables(report))
    if not report.passed:
        raise typer.Exit(EXIT_THRESHOLD_FAILED)


def verify_tables(report: VerifyReport) -> Group:
    """Print the stages and the losslessness check, as two tables and a verdict."""
    from rich.console import Group
    from rich.text import Text

    thresholds = list(dict.fromkeys(row.threshold for row in report.rows))
    notes = [Text(f"{i}: {threshold}") for i, threshold in enumerate(thresholds, start=1)]
    verdict = "all thresholds hold" if report.passed else "a threshold was missed"
    return Group(
        _stages_table(report.rows, thresholds),
        *notes,
        _losslessness_table(report.losslessness),
        Text(verdict, style="green" if report.passed else "red"),
    )


def _stages_table(rows: Sequence[VerifyRow], thresholds: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title="stages against the reference", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for heading in ("rows", "cosine", "error", "argmax", "top-k", "rule"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row.stage,
            str(row.rows),
            f"{row.cosine:.7f}",
            f"{row.max_error:.1e}",
            _share(row.argmax_agreement),
            _share(row.topk_agreement),
            str(thresholds.index(row.threshold) + 1),
            _verdict(row.passed),
        )
    return table


def _losslessness_table(rows: Sequence[LosslessRow]) -> Table:
    from rich.table import Table

    table = Table(title="same tokens with and without the draft", title_justify="left")
    table.add_column("check", no_wrap=True)
    for heading in ("prompts", "tokens", "differ", "ties"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row.name,
            str(row.prompts),
            str(row.tokens),
            str(row.differences),
            str(row.near_ties),
            _verdict(row.passed),
        )
    return table


def _share(agreement: float | None) -> str:
    return "–" if agreement is None else f"{agreement:.1%}"


def _verdict(passed: bool) -> Text:
    from rich.text import Text

    return Text("ok", style="green") if passed else Text("failed", style="red")
