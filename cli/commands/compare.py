"""``specbuild compare``: compare the accuracy and speed of two engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.cli.compare.options import SpeedOptions, TextOptions
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug, Json, Threads, suggest_neighbour
from specbuild.cli.terminal.plot_file import require_plot_place

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import Prompt


@takes_options
def compare(
    reference: Annotated[
        Path,
        typer.Argument(metavar="REFERENCE", help="Reference engine.", callback=suggest_neighbour),
    ],
    other: Annotated[
        Path,
        typer.Argument(
            metavar="OTHER", help="Other engine of the same model.", callback=suggest_neighbour
        ),
    ],
    *,
    text: TextOptions,
    speed: SpeedOptions,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Also draw the divergence by position."),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Compare two engines of the same model: accuracy, speed and size.

    Both engines evaluate the same text: perplexity, KL divergence, and the share of
    positions with the same most likely token. Then both decode the same prompts
    greedily in turn, each with its own draft. Both are loaded at the same time.

    After [b]--context[/b] tokens, an engine with SpecPV or DSA processes one token at a
    time, as in decoding. Use a context above its threshold, and longer pieces.

    \b
    Examples:
    specbuild compare engine engine-dsa --text book.txt
    specbuild compare engine engine-specpv --text book.txt --context 1024
    specbuild compare bf16 fp8 --text ids.npy --max-new-tokens 0 --json
    """
    from specbuild.cli.compare import measurement, texts
    from specbuild.cli.terminal import console
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.settings import RuntimeSettings

    require_plot_place(plot)
    settings = RuntimeSettings(threads=threads)
    loaded = measurement.Engines(
        load_engine(reference, settings),
        load_engine(other, settings),
        (str(reference), str(other)),
    )
    texts.require_same_tokens(loaded.reference, loaded.other)
    pieces = texts.pieces(text, loaded.reference, longest=texts.longest_piece(loaded.both, text))
    compare_settings = measurement.CompareSettings(text.context, speed.max_new_tokens, speed.rounds)
    with ProgressBar() as progress:
        comparison = measurement.compare(
            loaded, pieces, _prompts(loaded.reference, speed.prompts), compare_settings, progress
        )
    if as_json:
        print(console.json_line(comparison))
    else:
        from specbuild.cli.tables.comparison_table import comparison_tables

        console.output().print(comparison_tables(comparison))
    if plot is not None:
        from specbuild.cli.compare.plot import plot as draw

        draw(comparison, plot)


def _prompts(engine: Engine, file: Path | None) -> list[Prompt]:
    from specbuild.cli.terminal.prompt_file import read_prompt_file, tokenised
    from specbuild.runtime.request import GenerateParams

    return [] if file is None else tokenised(engine, read_prompt_file(file), GenerateParams())
