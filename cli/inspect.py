"""``specbuild inspect``: what an engine holds and will take."""

from __future__ import annotations

from typing import Annotated

import typer

from specbuild.cli import options


def inspect(
    engine: options.EngineDirectory,
    as_json: options.Json = False,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", metavar="N", min=1, help="Predict memory for this batch."),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max-seq-len", metavar="N", min=1, help="Predict memory for this length."),
    ] = None,
    _debug: options.Debug = False,
) -> None:
    """Show an engine's geometry, limits, sizes, ops, and the memory it will take.

    Memory is predicted for the limits of the engine, or for those given here:
    what an engine built with them would take.

    \b
    Examples:
    specbuild inspect engine
    specbuild inspect engine --max-batch-size 8 --max-seq-len 8192
    specbuild inspect engine --json
    """
    from specbuild.cli.predicted_memory import predict_memory
    from specbuild.runtime.engine_file import read_manifest

    manifest = read_manifest(engine)
    memory = predict_memory(manifest, max_batch_size=max_batch_size, max_seq_len=max_seq_len)
    if as_json:
        import json

        from specbuild.runtime.strict_json import to_json

        facts = to_json(manifest) | {"predicted_memory": to_json(memory)}
        print(json.dumps(facts, allow_nan=False))
        return
    from specbuild.cli.console import output
    from specbuild.cli.engine_table import engine_tables

    output().print(engine_tables(manifest, memory))
