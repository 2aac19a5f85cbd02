"""Add an MTP layer to small random Qwen3.5 models, with the names of the releases."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_files import Tensors, edit_config, edit_tensors


def add_qwen_predictor(
    path: Path, *, like: int, counted: bool = True, prefix: str = "model."
) -> None:
    """Add a random layer of the shapes of layer ``like``, which has keys and values.

    ``counted``: the configuration counts the layer, as in Qwen3.5. ``prefix`` is that of the text
    model's tensors.
    """
    if counted:
        edit_config(path, mtp_num_hidden_layers=1)
    edit_tensors(path, lambda tensors: tensors.update(_predictor(tensors, like, prefix)))


def _predictor(tensors: Tensors, like: int, prefix: str) -> Tensors:
    generator = torch.Generator().manual_seed(9)
    layer, norm = f"{prefix}layers.{like}.", tensors[f"{prefix}norm.weight"]
    hidden = len(norm)
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (hidden, 2 * hidden)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = (hidden,)
    for name, tensor in tensors.items():
        if name.startswith(layer):
            shapes[f"mtp.layers.0.{name.removeprefix(layer)}"] = tuple(tensor.shape)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name.rpartition(".")[0]
        made[name] = (0.2 * noise if is_norm else noise * shape[-1] ** -0.5).to(norm.dtype)
    return made
