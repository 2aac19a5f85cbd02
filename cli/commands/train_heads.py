"""``specbuild train mla`` and ``specbuild train dsa``: train what a retrofit adds, nothing else."""

from __future__ import annotations

from specbuild.builder.training.heads.options import IndexerTraining, LatentTraining
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug


@takes_options
def mla(asked: LatentTraining, *, _debug: Debug = False) -> None:
    """Train the latents that stand for keys and values (MLA-lite), the model frozen.

    The model with latents learns to say what the model without them says.
    [b]mla_kv.safetensors[/b] of the output goes beside the checkpoint, where
    [b]build[/b] finds it. Under [b]torchrun -m specbuild.cli.main train mla ...[/b]
    several devices train together.

    \b
    Examples:
    specbuild train mla --model target --text corpus --rank 512 --output latents
    specbuild train mla --model m --text corpus --initial svd.safetensors --output b
    specbuild train mla --model m --text a.txt --rank 256 --output b --loss hidden-mse
    """
    from specbuild.builder.training.heads.train_latents import train_latents
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        train_latents(asked, progress)


@takes_options
def dsa(asked: IndexerTraining, *, _debug: Debug = False) -> None:
    """Train indexers that choose the tokens to attend to (DSA-lite), the model frozen.

    They learn from the model's own attention. Latents beside the model stay as
    they are; [b]--joint-steps[/b] then trains both. Under
    [b]torchrun -m specbuild.cli.main train dsa ...[/b] several devices train together.

    \b
    Examples:
    specbuild train dsa --model target --text corpus --output indexers
    specbuild train dsa --model mla --text corpus --output both --joint-steps 300
    specbuild train dsa --model m --text corpus --output b --loss logits-kl
    """
    from specbuild.builder.training.heads.train_indexers import train_indexers
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        train_indexers(asked, progress)
