"""A safetensors file of tensors that are in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from specbuild.builder.durable import fsync, write_bytes


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes them; the file appears whole or not at all, with the rights of any new file.

    (``safetensors.torch.save_file`` leaves it readable for its owner alone.)
    """
    unfinished = file.with_name(f".{file.name}.writing")
    write_bytes(unfinished, save(dict(tensors), metadata={"format": "pt"}))
    unfinished.rename(file)
    fsync(file.parent)
