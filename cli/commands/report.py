"""``specbuild report``: an engine and its measurements on one page."""

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
            help="Output of bench, compare, estimate, verify or run with --json.",
        ),
    ] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE.html", help="HTML file to write.")
    ],
    verify_key: VerifyKey = None,
    pin: Pin = None,
    _debug: Debug = False,
) -> None:
    """Write an HTML page about an engine and its measurements.

    The page begins with the result of the records: a sentence, and bars of tokens/s.
    Geometry, memory, kernel selection, step times and provenance come from the
    engine; no GPU is needed and no weights are read. Roofline, launches, speed,
    acceptance and fidelity come from the records. The page has no external
    resources, and names the record of each figure.

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
