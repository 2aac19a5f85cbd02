"""The tables of ``inspect`` for a checkpoint."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from specbuild.cli.model.inspection import CheckpointReport
from specbuild.cli.tables.engine_table import target_table
from specbuild.cli.terminal.console import fact_table, size_text

_MAX_TYPES = 8


def checkpoint_tables(report: CheckpointReport) -> Group:
    """Return the checkpoint, its model, the possible builds, and the capacity of the GPU."""
    parts: list[Table | str] = [_files_table(report), target_table(report.target)]
    parts.append(_backends_table(report))
    if report.gpu is not None:
        parts.append(_capacity_table(report))
    return Group(*parts)


def _files_table(report: CheckpointReport) -> Table:
    table = fact_table("checkpoint")
    table.add_row("model", report.model)
    files = "1 file" if report.files == 1 else f"{report.files} files"
    table.add_row("size", f"{size_text(report.file_bytes)} in {files}")
    table.add_row("parameters", f"{report.parameters / 1e6:,.0f} million")
    types = [f"{name} × {count}" for name, count in report.types.items()]
    table.add_row("types of tensors", ", ".join(types[:_MAX_TYPES]))
    if report.quantization is not None:
        table.add_row("quantization", report.quantization.scheme)
        table.add_row("activations", report.quantization.activations)
    table.add_row("tokenizer", "yes" if report.has_tokenizer else "none: prompts are token ids")
    for warning in report.warnings:
        table.add_row("warning", warning)
    return table


def _backends_table(report: CheckpointReport) -> Table:
    table = Table(title="can be built for", title_justify="left")
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("weights, at most", justify="right", no_wrap=True)
    table.add_column("KV caches", justify="right", no_wrap=True)
    for answer in report.backends:
        sizes = (answer.weights_bytes, answer.cache_bytes)
        texts = ["" if size is None else size_text(size) for size in sizes]
        table.add_row(answer.backend, answer.reason or "yes", *texts)
    return table


def _capacity_table(report: CheckpointReport) -> Table:
    assert report.gpu_bytes is not None
    title = f"on one {report.gpu} ({size_text(report.gpu_bytes)})"
    if not report.capacity:
        table = fact_table(title)
        table.add_row("none", "a CUDA engine cannot be built of this checkpoint")
        return table
    table = Table(title=title, title_justify="left")
    table.add_column("tokens of each", justify="right")
    table.add_column("sequences", justify="right")
    for entry in report.capacity:
        table.add_row(
            str(entry.tokens), str(entry.sequences) if entry.sequences else "does not fit"
        )
    return table
