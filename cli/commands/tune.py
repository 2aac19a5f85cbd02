"""``specbuild tune``: measure kernel variants and steps on this GPU for an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.cli.options.shared import Debug, EngineDirectory, Json

if TYPE_CHECKING:
    from rich.table import Table

    from specbuild.builder.backends.cuda.tuning.tune import TuneReport


def tune(
    engine: EngineDirectory,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Tactic file to write or extend; default: ENGINE.tactics.json next to the engine.",
            rich_help_panel="Kernel variants",
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            "--ops",
            metavar="NAMES",
            help="Only these ops, for example RmsMoe,Linear.",
            rich_help_panel="Kernel variants",
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max-rows",
            metavar="N",
            min=1,
            help="Only launches with at most N rows.",
            rich_help_panel="Kernel variants",
        ),
    ] = None,
    used_by: Annotated[
        Path | None,
        typer.Option(
            "--used-by",
            metavar="FILE.json",
            help="Only launches of programs counted in this report of bench suite.",
            rich_help_panel="Kernel variants",
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            metavar="N",
            min=1,
            help="Tokens per sequence.",
            rich_help_panel="Kernel variants",
        ),
    ] = 1024,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            min=0.0,
            help="Start no further shape after S seconds.",
            rich_help_panel="Kernel variants",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Repeat measurements that the tactic file already has.",
            rich_help_panel="Kernel variants",
        ),
    ] = False,
    skip_tactics: Annotated[
        bool,
        typer.Option(
            "--skip-tactics",
            help="Do not tune kernels.",
            rich_help_panel="Kernel variants",
        ),
    ] = False,
    skip_costs: Annotated[
        bool,
        typer.Option(
            "--skip-costs", help="Do not measure step times.", rich_help_panel="Step costs"
        ),
    ] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure kernel variants at the engine's shapes, and select the fastest.

    Needs the GPU that the engine was built for. The results go to a tactic file,
    which [b]build --tactics[/b] can read on a machine without a GPU. A variant is
    selected if it is more than 2 % faster than the default with identical bits.

    Then complete steps are measured for each batch size, draft and several contexts,
    which takes about a minute. Their times are stored in the engine, and select
    the draft length on this kind of GPU.

    \b
    Examples:
    specbuild tune engine
    specbuild tune engine --output h200.json --seconds 300
    specbuild tune engine --skip-tactics
    """
    from specbuild.builder.backends.cuda.tuning.tune import TuneOptions, tune_engine
    from specbuild.cli.bench.suite.stored import programs_of
    from specbuild.cli.commands.tune_costs import tune_costs
    from specbuild.cli.tables.step_cost_table import step_cost_table
    from specbuild.cli.terminal.console import json_line, messages
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.errors import SpecbuildError

    if skip_tactics and skip_costs:
        raise SpecbuildError(
            "--skip-tactics and --skip-costs together leave nothing to measure; give one of them"
        )
    asked = TuneOptions(
        engine=engine,
        output=output,
        ops=tuple(filter(None, (ops or "").split(","))),
        max_rows=max_rows,
        programs=None if used_by is None else programs_of(used_by),
        context=context,
        seconds=seconds,
        force=force,
    )
    report = costs = None
    try:
        with ProgressBar() as progress:
            report = None if skip_tactics else tune_engine(asked, progress)
            costs = None if skip_costs else tune_costs(engine, progress)
    finally:
        # The tactics are stored in the engine even if the cost measurement fails.
        if as_json and (report or costs):
            print(json_line({"tactics": report, "step_costs": costs}))
        elif report is not None:
            messages().print(tune_table(report))
    if costs is not None and not as_json:
        messages().print(step_cost_table(costs))


def tune_table(report: TuneReport) -> Table:
    """Print the measurements, and the gains by op."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("tuned")
    table.add_row("GPU", report.device)
    table.add_row("tactic file", report.file)
    table.add_row("measured", f"{len(report.measured)} of {report.shapes} shapes")
    if report.left:
        table.add_row("not reached", f"{report.left} shapes; give more --seconds")
    for op in sorted({shape.op for shape in report.measured}):
        shapes = [shape for shape in report.measured if shape.op == op]
        faster = [shape for shape in shapes if shape.tactic]
        gains = ", ".join(
            f"{shape.rows} rows {shape.default_us:.1f} → {shape.median_us:.1f} µs"
            for shape in faster
        )
        table.add_row(op, f"{len(faster)} of {len(shapes)} faster{': ' if gains else ''}{gains}")
    for shape in report.measured:
        for each in shape.dropped:
            what = f"{shape.op}, {shape.phase}, {shape.rows} rows, {each.tactic}"
            table.add_row("dropped", f"{what}: {each.reason}")
    used = report.tactics
    table.add_row("engine", f"{used.tuned_launches} of {used.launches} launches tuned")
    table.add_row("took", f"{report.seconds:.0f} s")
    return table
