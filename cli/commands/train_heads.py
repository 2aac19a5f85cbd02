"""``specbuild train mla`` and ``specbuild train dsa``: train what a retrofit adds, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specbuild.cli.options.shared import Debug, Model
from specbuild.runtime.errors import SpecbuildError

Text = Annotated[
    list[Path],
    typer.Option("--text", metavar="PATH", help="Training text: file or directory; repeatable."),
]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory to write.")]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimiser steps.")]
BatchSize = Annotated[
    int,
    typer.Option("--batch-size", metavar="N", min=1, help="Sequences in a step, over all devices."),
]
MicroBatch = Annotated[
    int | None,
    typer.Option("--micro-batch", metavar="N", min=1, help="Sequences a device runs at a time."),
]
SequenceLength = Annotated[
    int, typer.Option("--sequence-length", metavar="N", min=2, help="Tokens of a sequence.")
]
LearningRate = Annotated[
    float, typer.Option("--learning-rate", metavar="X", help="Peak learning rate.")
]
Loss = Annotated[
    list[str] | None,
    typer.Option(
        "--loss",
        metavar="TERM[=W]",
        help="Term to minimise and its weight; repeatable. See the documentation for the terms.",
    ),
]
HiddenLayers = Annotated[
    str | None,
    typer.Option("--hidden-layers", metavar="LIST", help="Layers that hidden-mse compares."),
]
LongContext = Annotated[
    int,
    typer.Option("--long-context", metavar="N", min=0, help="Where long-logits-l2 begins."),
]
HeldOut = Annotated[
    list[Path] | None,
    typer.Option("--held-out", metavar="PATH", help="Text kept for judging; repeatable."),
]
HeldOutRows = Annotated[
    int, typer.Option("--held-out-rows", metavar="N", min=1, help="Most sequences to judge by.")
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--checkpointing", help="Compute activations again in the backward pass: less memory."
    ),
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where to train.")]
Dtype = Annotated[
    Literal["float32", "bfloat16"], typer.Option("--dtype", help="Arithmetic of the model.")
]
StoredDtype = Annotated[
    Literal["float32", "bfloat16"], typer.Option("--stored-dtype", help="How tensors are stored.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Random seed.")]
SaveEvery = Annotated[
    int, typer.Option("--save-every", metavar="N", min=1, help="Steps between saves.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last save.")]
Finish = Annotated[
    bool,
    typer.Option("--finish", help="With --resume: write what was reached, without further steps."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit-s", metavar="X", help="End early, ready for --resume."),
]
Layers = Annotated[
    str | None, typer.Option("--layers", metavar="LIST", help="Layers to change, as 0-11,15.")
]


def mla(
    *,
    model: Model,
    text: Text,
    output: Output,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", metavar="R", min=1, help="Begin with what retrofit mla makes at this rank."
        ),
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option("--initial", metavar="FILE", help="Begin with the latents in this file."),
    ] = None,
    layers: Layers = None,
    lora_rank: Annotated[
        int,
        typer.Option("--lora-rank", metavar="R", min=0, help="LoRA on layers' outputs; 0: none."),
    ] = 0,
    loss: Loss = None,
    hidden_layers: HiddenLayers = None,
    long_context: LongContext = 8192,
    steps: Steps = 1000,
    batch_size: BatchSize = 8,
    micro_batch: MicroBatch = None,
    sequence_length: SequenceLength = 512,
    learning_rate: LearningRate = 4e-4,
    held_out: HeldOut = None,
    held_out_rows: HeldOutRows = 32,
    checkpointing: Checkpointing = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    stored_dtype: StoredDtype = "bfloat16",
    seed: Seed = 0,
    save_every: SaveEvery = 200,
    resume: Resume = False,
    finish: Finish = False,
    time_limit_s: TimeLimit = None,
    _debug: Debug = False,
) -> None:
    """Train the latents that stand for keys and values (MLA-lite), the model frozen.

    The model with latents learns to say what the model without them says.
    [b]mla_kv.safetensors[/b] of the output goes beside the checkpoint, where
    [b]build[/b] finds it. Under [b]torchrun -m specbuild.cli.main train mla ...[/b]
    several devices train together.

    \b
    Examples:
    specbuild train mla --model target --text corpus --rank 512 --output latents
    specbuild train mla --model target --text corpus --initial svd.safetensors --output latents
    specbuild train mla --model target --text a.txt --rank 256 --output b --loss hidden-mse=0.5
    """
    from specbuild.builder.training.heads.options import LatentTraining
    from specbuild.builder.training.heads.train_latents import train_latents
    from specbuild.cli.terminal.progress_bar import ProgressBar

    asked = LatentTraining(
        model=model,
        texts=tuple(text),
        output=output,
        rank=rank,
        initial=initial,
        layers=layers,
        lora_rank=lora_rank,
        hidden_layers=parse_list("--hidden-layers", hidden_layers),
        long_context=long_context,
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        held_out=tuple(held_out or ()),
        held_out_rows=held_out_rows,
        checkpointing=checkpointing,
        device=device,
        dtype=dtype,
        stored_dtype=stored_dtype,
        seed=seed,
        save_every=save_every,
        resume=resume,
        finish=finish,
        time_limit_s=time_limit_s,
        **given_losses(losses=("--loss", loss)),
    )
    with ProgressBar() as progress:
        train_latents(asked, progress)


def dsa(
    *,
    model: Model,
    text: Text,
    output: Output,
    heads: Annotated[
        int, typer.Option("--heads", metavar="N", min=1, help="Query heads of an indexer.")
    ] = 4,
    width: Annotated[
        int, typer.Option("--width", metavar="N", min=1, help="Width of its heads and keys.")
    ] = 256,
    layers: Layers = None,
    top_k: Annotated[
        str,
        typer.Option(
            "--top-k",
            metavar="K,...",
            help="Tokens chosen: the first to train by, all to judge by.",
        ),
    ] = "2048",
    first_tokens: Annotated[
        int, typer.Option("--first-tokens", metavar="N", min=0, help="First tokens, always kept.")
    ] = 4,
    recent_tokens: Annotated[
        int, typer.Option("--recent-tokens", metavar="N", min=1, help="Last tokens, always kept.")
    ] = 64,
    no_mla: Annotated[
        bool, typer.Option("--no-mla", help="Leave out latents that lie beside the model.")
    ] = False,
    joint_steps: Annotated[
        int,
        typer.Option(
            "--joint-steps", metavar="N", min=0, help="Further steps that train latents too."
        ),
    ] = 0,
    joint_loss: Annotated[
        list[str] | None,
        typer.Option("--joint-loss", metavar="TERM[=W]", help="As --loss, for those steps."),
    ] = None,
    joint_learning_rate: Annotated[
        float,
        typer.Option("--joint-learning-rate", metavar="X", help="Peak rate in those steps."),
    ] = 2e-4,
    loss: Loss = None,
    hidden_layers: HiddenLayers = None,
    long_context: LongContext = 8192,
    steps: Steps = 1000,
    batch_size: BatchSize = 8,
    micro_batch: MicroBatch = None,
    sequence_length: SequenceLength = 4096,
    learning_rate: LearningRate = 1e-3,
    held_out: HeldOut = None,
    held_out_rows: HeldOutRows = 32,
    checkpointing: Checkpointing = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    stored_dtype: StoredDtype = "bfloat16",
    seed: Seed = 0,
    save_every: SaveEvery = 200,
    resume: Resume = False,
    finish: Finish = False,
    time_limit_s: TimeLimit = None,
    _debug: Debug = False,
) -> None:
    """Train indexers that choose the tokens to attend to (DSA-lite), the model frozen.

    They learn from the model's own attention. Latents beside the model stay as
    they are; [b]--joint-steps[/b] then trains both. Under
    [b]torchrun -m specbuild.cli.main train dsa ...[/b] several devices train together.

    \b
    Examples:
    specbuild train dsa --model target --text corpus --output indexers --top-k 2048
    specbuild train dsa --model target --text corpus --output both --joint-steps 300
    specbuild train dsa --model target --text corpus --output indexers --loss logits-kl
    """
    from specbuild.builder.training.heads.options import IndexerTraining
    from specbuild.builder.training.heads.train_indexers import train_indexers
    from specbuild.cli.terminal.progress_bar import ProgressBar

    asked = IndexerTraining(
        model=model,
        texts=tuple(text),
        output=output,
        heads=heads,
        width=width,
        layers=layers,
        top_k=parse_list("--top-k", top_k) or (),
        first_tokens=first_tokens,
        recent_tokens=recent_tokens,
        mla=not no_mla,
        joint_steps=joint_steps,
        joint_learning_rate=joint_learning_rate,
        hidden_layers=parse_list("--hidden-layers", hidden_layers),
        long_context=long_context,
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        held_out=tuple(held_out or ()),
        held_out_rows=held_out_rows,
        checkpointing=checkpointing,
        device=device,
        dtype=dtype,
        stored_dtype=stored_dtype,
        seed=seed,
        save_every=save_every,
        resume=resume,
        finish=finish,
        time_limit_s=time_limit_s,
        **given_losses(losses=("--loss", loss), joint_losses=("--joint-loss", joint_loss)),
    )
    with ProgressBar() as progress:
        train_indexers(asked, progress)


def given_losses(**lists: tuple[str, list[str] | None]) -> dict[str, Any]:
    """The losses that an option was given, by field; ``logits-kl=0.5`` is a term and its weight."""
    found = {}
    for name, (option, entries) in lists.items():
        if entries:
            found[name] = tuple(_loss(option, entry) for entry in entries)
    return found


def _loss(option: str, entry: str) -> tuple[str, float]:
    name, _, weight = entry.partition("=")
    try:
        return name, float(weight or 1)
    except ValueError as error:
        raise SpecbuildError(
            f"{option} {entry}: {weight!r} is no number; write {name}=0.5"
        ) from error


def parse_list(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of ``1,11,21``."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecbuildError(
            f"{option} {text} is not a list of numbers: write them as 1,11,21"
        ) from error
