"""Write random indexers (DSA-lite) for a checkpoint of ``checkpoints.write_target``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from random_weights import Tensors
from safetensors import safe_open
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
    """Write ``dsa_indexer.safetensors``. One head is the simple form with W_q = W_k."""
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


def write_derived_indexers(path: Path, checkpoint: Path, layers: Iterable[int], width: int) -> None:
    """Write indexers of one head from the attention's projections, so that scores are useful.

    ``W_q W_kᵀ`` is the best approximation of rank ``width`` to ``Σ_h W_q,h W_k,hᵀ``, the sum over
    query heads of the scores of contents alone (no rotation, no bias). Each side gets half of each
    singular value.
    """
    tensors = {}
    with safe_open(checkpoint, framework="pt") as weights:
        for layer in layers:
            name = f"model.layers.{layer}.self_attn."
            q, k, sinks = (
                weights.get_tensor(f"{name}{part}").double()
                for part in ("q_proj.weight", "k_proj.weight", "sinks")
            )
            width_of_head = len(q) // len(sinks)
            q_heads, k_heads = (w.view(-1, width_of_head, w.shape[1]) for w in (q, k))
            group = len(q_heads) // len(k_heads)
            scores = torch.einsum("hdi,hdj->ij", q_heads, k_heads.repeat_interleave(group, 0))
            left, values, right = torch.linalg.svd(scores)
            root = values[:width].sqrt()
            tensors[f"{name}dsa_W_q"] = (left[:, :width] * root).float().contiguous()
            tensors[f"{name}dsa_W_k"] = (right[:width].T * root).float().contiguous()
    save_file(tensors, path / INDEXER_FILE)
