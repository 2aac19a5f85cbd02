"""``specbuild bench server``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from specbuild.cli.bench.options import ServerLoadOptions
from specbuild.cli.terminal.plot_file import require_plot_place
from specbuild.runtime.errors import SpecbuildError

_TIMEOUT_S = 600.0


def run_load(
    url: str,
    load_options: ServerLoadOptions,
    files: Sequence[Path],
    *,
    max_new_tokens: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Load a server and report what its clients see. SpecbuildError if it does not respond."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise SpecbuildError(
            "bench server needs httpx: pip install '.[serve]' in the checkout"
        ) from error
    del httpx
    from rich.progress import MofNCompleteColumn, Progress

    from specbuild.cli.bench.server.load import LoadSettings, measure
    from specbuild.cli.bench.server.show import load_table, load_text, plot_load
    from specbuild.cli.terminal import console
    from specbuild.cli.terminal.prompt_file import read_prompt_file

    require_plot_place(plot)
    placed = [entry.prompt for file in files for entry in read_prompt_file(file)]
    prompts = tuple(p.prompt if p.prompt is not None else p.prompt_ids or () for p in placed)
    settings = LoadSettings(
        requests=load_options.requests,
        clients=load_options.clients,
        rate=load_options.rate,
        prompts=prompts,
        prompt_tokens=load_options.prompt_tokens,
        max_new_tokens=max_new_tokens,
    )
    messages = console.messages()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as bar:
        task = bar.add_task("requests", total=settings.requests)
        report = asyncio.run(
            measure(
                url,
                settings,
                model=load_options.model,
                key=load_options.api_key,
                timeout_s=_TIMEOUT_S,
                done=lambda _: bar.advance(task),
            )
        )
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(load_text(report), soft_wrap=True)
        console.output().print(load_table(report))
    if report.errors == report.requests:
        raise SpecbuildError(f"no request was served: {report.first_error}")
    if plot is not None:
        plot_load(report, plot)
