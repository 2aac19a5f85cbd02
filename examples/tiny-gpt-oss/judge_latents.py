"""Perplexity of held-out text with several files of latents, fp32 (docs/smaller-caches.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from specbuild.builder.checkpoint.latents import read_latent_file
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.retrofit.config import LatentOptions, parse_layers
from specbuild.builder.training.retrofit.mla import losses_with
from specbuild.builder.training.retrofit.streamed_target import StreamedTarget
from specbuild.builder.training.retrofit.text import read_text


def main() -> None:
    """Print one line per file: its perplexity, and the change from the model's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--layers", help="use the latents of these layers only, as 12-23")
    parser.add_argument("files", type=Path, nargs="*")
    args = parser.parse_args()
    target = read_target(args.model, strict=False, mla=False)
    options = LatentOptions(model=args.model, rank=1, evaluation=(args.text,))
    ids = read_text(options, target).evaluation
    layers = target.geometry.layers
    chosen = range(layers) if args.layers is None else parse_layers(args.layers, layers)
    base = None
    for file in [None, *args.files]:
        sources, tensors = target.tensors, dict[str, torch.Tensor]()
        if file is not None:
            sources = target.tensors | read_latent_file(file, target.geometry)[0]
            tensors = {n: t for n, t in load_file(file).items() if int(n.split(".")[2]) in chosen}
        streamed = StreamedTarget(target.geometry, sources)
        losses = losses_with(streamed, tensors, ids, SilentProgress())
        perplexity = float(torch.exp(losses.mean()))
        base = base or perplexity
        print(f"{file or 'the model itself'}: {perplexity:.4f} ({perplexity / base - 1:+.2%})")


if __name__ == "__main__":
    main()
