"""Writes a checkpoint's tensors as safetensors shards with an index, a part in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specbuild.builder.checkpoint.source import DTYPE_BITS
from specbuild.builder.durable import fsync, write_bytes
from specbuild.builder.progress import Progress
from specbuild.builder.synth.tensor import SynthTensor

SHARD_BYTES = 5_000_000_000


def write_shards(
    folder: Path,
    tensors: Mapping[str, SynthTensor],
    progress: Progress,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard_bytes`` and their index."""
    shards = _split(tensors, shard_bytes)
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", shards[0], progress)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard, progress)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(file: Path, data: Any) -> None:
    """Write indented JSON and sync it."""
    write_bytes(file, (json.dumps(data, indent=2) + "\n").encode())


def _split(tensors: Mapping[str, SynthTensor], most: int) -> list[dict[str, SynthTensor]]:
    shards: list[dict[str, SynthTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > most:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _write_shard(file: Path, tensors: Mapping[str, SynthTensor], progress: Progress) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Larger elements are first, so that each tensor is aligned to its element's size.
    order = sorted(tensors.items(), key=lambda item: -_element_bytes(item[1].dtype))
    for name, tensor in order:
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in order:
            for part in tensor.chunks():
                stream.write(part.contiguous().flatten().view(torch.uint8).numpy().data)
                progress.advance(part.nbytes)
    fsync(file)


def _element_bytes(dtype: str) -> int:
    return DTYPE_BITS[dtype] // 8
