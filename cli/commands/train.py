"""``specbuild train``: what a checkpoint lacks, learned from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specbuild.cli.commands import train_heads
from specbuild.cli.commands.train_heads import parse_list
from specbuild.cli.options.shared import Debug, Model
from specbuild.cli.terminal.help_page import Command

train = typer.Typer(help="Train what a checkpoint lacks.", no_args_is_help=True)


@train.callback()
def _train() -> None:
    """Train what a checkpoint lacks: a draft, latents, indexers."""


@train.command(cls=Command)
def draft(
    *,
    model: Model,
    text: Annotated[
        list[Path],
        typer.Option(
            "--text", metavar="PATH", help="Training text: file or directory; repeatable."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Checkpoint directory to write.")
    ],
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Optimiser steps.")
    ] = 2000,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Sequences in a step.")
    ] = 8,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", min=2, help="Tokens of a sequence.")
    ] = 512,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", help="Peak learning rate.")
    ] = 1e-4,
    ttt_steps: Annotated[
        int,
        typer.Option("--ttt-steps", metavar="N", min=1, help="Draft levels unrolled in training."),
    ] = 7,
    draft_vocab: Annotated[
        int | None,
        typer.Option("--draft-vocab", metavar="N", min=1, help="Tokens that the draft can say."),
    ] = None,
    inner: Annotated[
        int | None, typer.Option("--inner", metavar="N", min=1, help="Inner width of its MLP.")
    ] = None,
    q_heads: Annotated[
        int | None, typer.Option("--q-heads", metavar="N", min=1, help="Its query heads.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", metavar="N", min=1, help="Its KV heads.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", min=2, help="Width of its heads.")
    ] = None,
    rope_theta: Annotated[
        float, typer.Option("--rope-theta", metavar="X", help="Base of its rotary embedding.")
    ] = 10000.0,
    taps: Annotated[
        str | None,
        typer.Option("--taps", metavar="I,J,K", help="Target layers whose outputs it reads."),
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option("--held-out", metavar="PATH", help="Text kept for judging; repeatable."),
    ] = None,
    self_text: Annotated[
        int,
        typer.Option(
            "--self-text", metavar="N", min=0, help="Sequences the target writes to train on too."
        ),
    ] = 0,
    self_text_temperature: Annotated[
        float, typer.Option("--self-text-temperature", min=0.0, help="How the target writes them.")
    ] = 0.0,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="Where to train.")
    ] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="Arithmetic of the forwards.")
    ] = "float32",
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Random seed.")] = 0,
    save_every: Annotated[
        int, typer.Option("--save-every", metavar="N", min=1, help="Steps between saves.")
    ] = 500,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last save in the output.")
    ] = False,
    time_limit_s: Annotated[
        float | None,
        typer.Option("--time-limit-s", metavar="X", help="End early, ready for --resume."),
    ] = None,
    _debug: Debug = False,
) -> None:
    """Train an EAGLE3 draft for a target, with test-time training.

    Text is [b].py .txt .md .jsonl[/b] files, or directories of them. Sizes left
    out are chosen to fit the target. The output is a draft checkpoint for
    [b]specbuild build --draft[/b].

    \b
    Examples:
    specbuild train draft --model target --text corpus --output draft --steps 2000
    specbuild train draft --model target --text a.txt --text b.txt --output draft --resume
    """
    from specbuild.builder.training.config import SelfText, TrainOptions
    from specbuild.builder.training.draft import train_draft
    from specbuild.cli.terminal.progress_bar import ProgressBar

    asked = TrainOptions(
        model=model,
        texts=tuple(text),
        output=output,
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        ttt_steps=ttt_steps,
        draft_vocab=draft_vocab,
        inner=inner,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        taps=parse_list("--taps", taps),
        held_out=tuple(held_out or ()),
        self_text=SelfText(count=self_text, temperature=self_text_temperature),
        device=device,
        dtype=dtype,
        seed=seed,
        save_every=save_every,
        resume=resume,
        time_limit_s=time_limit_s,
    )
    with ProgressBar() as progress:
        train_draft(asked, progress)
    typer.echo(f"{output} holds the draft, for specbuild build --draft", err=True)


train.command(cls=Command)(train_heads.mla)
train.command(cls=Command)(train_heads.dsa)
