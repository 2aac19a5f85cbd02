"""Write random latents (MLA-lite) for a checkpoint of ``checkpoints.write_target``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from random_weights import Tensors
from safetensors import safe_open
from safetensors.torch import save_file


def write_latents(
    path: Path, dims: Mapping[int, int], *, hidden: int = 64, kv_width: int = 32, seed: int = 3
) -> Tensors:
    """Write ``mla_kv.safetensors``. ``dims`` maps layers to the width of their latent."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, dim in dims.items():
        sizes = {
            "mla_W_c": (hidden, dim),
            "mla_W_k_lat": (dim, kv_width),
            "mla_W_v_lat": (dim, kv_width),
        }
        for name, shape in sizes.items():
            drawn = torch.randn(shape, generator=generator) * shape[0] ** -0.5
            tensors[f"model.layers.{layer}.self_attn.{name}"] = drawn
    save_file(tensors, path / "mla_kv.safetensors")
    return tensors


def write_factors(path: Path, checkpoint: Path, layers: Iterable[int], rank: int) -> None:
    """Write latents of a checkpoint's layers: factors of ``[W_k | W_v]`` at a rank."""
    tensors = {}
    with safe_open(checkpoint, framework="pt") as weights:
        for layer in layers:
            name = f"model.layers.{layer}.self_attn."
            k, v = (weights.get_tensor(f"{name}{part}_proj.weight").double() for part in "kv")
            left, values, right = torch.linalg.svd(torch.cat([k, v]).T, full_matrices=False)
            tensors[f"{name}mla_W_c"] = (left[:, :rank] * values[:rank]).float().contiguous()
            ups = right[:rank].split([len(k), len(v)], dim=1)
            for part, up in zip("kv", ups, strict=True):
                tensors[f"{name}mla_W_{part}_lat"] = up.float().contiguous()
    save_file(tensors, path / "mla_kv.safetensors")
