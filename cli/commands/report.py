"""``specbuild report``: an engine and what was measured with it, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbuild.cli.options.shared import Debug, EngineDirectory, Pin, VerifyKey
from specbuild.runtime.errors import SpecbuildError


def report(
    engine: EngineDirectory,
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RECORD]...",
            help="What bench, compare, plan, verify or run printed with --json.",
        ),
    ] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE.html", help="The page to write.")
    ],
    verify_key: VerifyKey = None,
    pin: Pin = None,
    _debug: Debug = False,
) -> None:
    """Write one HTML page on an engine: what it is, takes and runs, and what was measured.

    Geometry, memory, kernels and why they were chosen, step costs as curves, and
    provenance come from the engine itself; no GPU is needed and no weights are
    read. Roofline, a layer's launches, speed, acceptance and fidelity come from
    the records. The page needs nothing else, and names the record of each figure.

    \b
    Examples:
    specbuild report engine --output report.html
    specbuild report engine sweep.json --output report.html
    """
    from specbuild.builder.durable import replace_bytes
    from specbuild.cli.report.engine_facts import engine_facts
    from specbuild.cli.report.page import page
    from specbuild.cli.report.records import read_records
    from specbuild.cli.terminal.console import say
    from specbuild.runtime.engine_dir.origin import Origin

    if not output.parent.is_dir():
        raise SpecbuildError(f"--output {output}: {output.parent} is no directory; make it first")
    facts = engine_facts(engine, Origin(verify_key, pin))
    written = page(facts, read_records(records or []))
    replace_bytes(output, written.encode())
    say(f"{output} has the report on {engine}")
