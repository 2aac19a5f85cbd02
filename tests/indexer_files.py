"""Writes random indexers (DSA-lite) beside a checkpoint that ``checkpoints.write_target`` wrote."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from random_weights import Tensors
from safetensors.torch import save_file

INDEXER_FILE = "dsa_indexer.safetensors"


def write_indexers(
    path: Path,
    layers: Iterable[int],
    *,
    hidden: int = 64,
    heads: int = 2,
    width: int = 8,
    seed: int = 5,
) -> Tensors:
    """``dsa_indexer.safetensors`` under ``path``; one head is the simple form, W_q = W_k alone."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(columns: int) -> torch.Tensor:
        return torch.randn(hidden, columns, generator=generator) * hidden**-0.5

    tensors = {}
    for layer in layers:
        name = f"model.layers.{layer}.self_attn.dsa_W_"
        tensors[f"{name}k"] = drawn(width)
        tensors[f"{name}q"] = tensors[f"{name}k"].clone() if heads == 1 else drawn(heads * width)
        if heads > 1:
            tensors[f"{name}h"] = drawn(heads).abs()
    save_file(tensors, path / INDEXER_FILE)
    return tensors
