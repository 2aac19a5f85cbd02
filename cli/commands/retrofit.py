"""``specbuild retrofit``: add components to a trained checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbuild.cli.options.shared import Debug, Json, Model
from specbuild.cli.terminal.help_page import Command, show_help_alone

if TYPE_CHECKING:
    from rich.table import Table

    from specbuild.builder.training.retrofit.report import LatentReport

retrofit = typer.Typer(
    help="Give a trained checkpoint what it was trained without.", invoke_without_command=True
)


@retrofit.callback()
def _retrofit(context: typer.Context) -> None:
    """Add components to a trained checkpoint."""
    show_help_alone(context)


@retrofit.command(cls=Command)
def mla(
    *,
    model: Model,
    rank: Annotated[
        int,
        typer.Option("--rank", metavar="R", min=1, help="Mean width of a latent over the layers."),
    ],
    calibration: Annotated[
        list[Path] | None,
        typer.Option("--calibration", metavar="PATH", help="Calibration text; repeatable."),
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            "--evaluation",
            metavar="PATH",
            help="Text for the perplexities; default: a fifth of the calibration text.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", metavar="LIST", help="Layers to change, for example 0-11,15; default: all."
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option("--tokens", metavar="N", min=1, help="Maximum number of calibration tokens."),
    ] = 16384,
    sequence_length: Annotated[
        int,
        typer.Option(
            "--sequence-length", metavar="N", min=2, help="Tokens per sequence of the text."
        ),
    ] = 512,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="Storage type of the latents.")
    ] = "float32",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="File to write; default: in the checkpoint directory."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Cache latents instead of keys and values (MLA-lite), by factorizing their projections.

    Calibration text weights the factorization by the activations, and gives
    sensitive layers a higher rank. Without it the factors are a plain SVD of the
    weights, which loses far more accuracy. [b]build[/b] finds the result in the
    checkpoint directory.

    \b
    Examples:
    specbuild retrofit mla --model target --rank 512 --calibration corpus
    specbuild retrofit mla --model m --rank 256 --calibration a.txt --json
    specbuild retrofit mla --model m --rank 512 --layers 12-23 --output late.safetensors
    """
    from specbuild.builder.training.retrofit.config import LatentOptions
    from specbuild.builder.training.retrofit.mla import retrofit_mla
    from specbuild.cli.terminal.console import json_line
    from specbuild.cli.terminal.console import output as results
    from specbuild.cli.terminal.progress_bar import ProgressBar

    asked = LatentOptions(
        model=model,
        rank=rank,
        calibration=tuple(calibration or ()),
        evaluation=tuple(evaluation or ()),
        layers=layers,
        tokens=tokens,
        sequence_length=sequence_length,
        dtype=dtype,
        output=output,
        force=force,
    )
    with ProgressBar() as progress:
        report = retrofit_mla(asked, progress)
    if as_json:
        print(json_line(report))
        return
    results().print(layer_table(report))
    results().print(summary_table(report))


def layer_table(report: LatentReport) -> Table:
    """Return the ranks and relative errors of every changed layer."""
    from rich.table import Table

    table = Table(title="relative errors", title_justify="left")
    for heading in ("layer", "rank", "W_k", "W_v", "keys", "values"):
        table.add_column(heading, justify="right")
    for row in report.layers:
        shares = (row.key_error, row.value_error, row.key_output_error, row.value_output_error)
        cells = ["–" if share is None else f"{share:.1e}" for share in shares]
        table.add_row(str(row.layer), str(row.rank), *cells)
    return table


def summary_table(report: LatentReport) -> Table:
    """Return the savings and costs of the latents."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("latents")
    table.add_row("file", report.file)
    table.add_row("method", f"{report.method}, {report.calibrated_tokens} tokens of text")
    before, after = report.bytes_per_token_before, report.bytes_per_token_after
    table.add_row("cache per token", f"{after} bytes, was {before} ({before / after:.2f} times)")
    if report.perplexity_before is not None and report.perplexity_after is not None:
        change = report.perplexity_after / report.perplexity_before - 1
        table.add_row(
            "perplexity",
            f"{report.perplexity_after:.4f}, was {report.perplexity_before:.4f} ({change:+.2%}) "
            f"on {report.evaluated_tokens} tokens",
        )
    return table
