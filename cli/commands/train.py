"""``specbuild train``: train components that a checkpoint lacks."""

from __future__ import annotations

import typer

from specbuild.builder.training.config import TrainOptions
from specbuild.cli.commands import train_heads
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug
from specbuild.cli.terminal.help_page import Command, show_help_alone

train = typer.Typer(help="Train what a checkpoint lacks.", invoke_without_command=True)


@train.callback()
def _train(context: typer.Context) -> None:
    """Train a draft, latents or indexers for a checkpoint."""
    show_help_alone(context)


@train.command(cls=Command)
@takes_options
def draft(options: TrainOptions, *, _debug: Debug = False) -> None:
    """Train a draft for a target: EAGLE3 with test-time training, or another kind.

    Training text is [b].py .txt .md .jsonl[/b] files, or directories of them. Sizes that
    are omitted follow the target. The output is a draft checkpoint for
    [b]specbuild build --draft[/b].

    \b
    Examples:
    specbuild train draft --model target --text corpus --output draft --steps 2000
    specbuild train draft --model m --text a.txt --text b --output d --resume
    specbuild train draft --model m --text corpus --output d --kind p-eagle
    """
    from specbuild.builder.training.draft import train_draft
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        train_draft(options, progress)
    messages().print(
        f"draft written to {options.output}; use it with specbuild build --draft", soft_wrap=True
    )


train.command(cls=Command)(train_heads.mla)
train.command(cls=Command)(train_heads.dsa)
