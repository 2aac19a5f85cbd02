"""``specbuild train mla`` and ``specbuild train dsa``: train only what a retrofit adds."""

from __future__ import annotations

from specbuild.builder.training.heads.options import IndexerTraining, LatentTraining
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug


@takes_options
def mla(options: LatentTraining, *, _debug: Debug = False) -> None:
    """Train latents that replace keys and values (MLA-lite) for a frozen model.

    The model with latents learns to reproduce the outputs of the model without them.
    Copy [b]mla_kv.safetensors[/b] from the output into the checkpoint directory, where
    [b]build[/b] finds it. For several devices use
    [b]torchrun -m specbuild.cli.main train mla ...[/b].

    \b
    Examples:
    specbuild train mla --model target --text corpus --rank 512 --output latents
    specbuild train mla --model m --text corpus --initial svd.safetensors --output b
    specbuild train mla --model m --text a.txt --rank 256 --output b --loss hidden-mse
    """
    from specbuild.builder.training.heads.train_latents import train_latents
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        train_latents(options, progress)


@takes_options
def dsa(options: IndexerTraining, *, _debug: Debug = False) -> None:
    """Train indexers that select the tokens to attend to (DSA-lite) for a frozen model.

    Indexers learn to reproduce the model's attention scores. Latents in the checkpoint
    directory do not change; [b]--joint-steps[/b] then trains both. For several devices use
    [b]torchrun -m specbuild.cli.main train dsa ...[/b].

    \b
    Examples:
    specbuild train dsa --model target --text corpus --output indexers
    specbuild train dsa --model mla --text corpus --output both --joint-steps 300
    specbuild train dsa --model m --text corpus --output b --loss logits-kl
    """
    from specbuild.builder.training.heads.train_indexers import train_indexers
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        train_indexers(options, progress)
