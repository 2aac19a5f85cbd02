"""Write and edit the files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SPECIAL_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")

Tensors = dict[str, torch.Tensor]


def write_tokenizer(path: Path, vocab: int) -> None:
    """Write a byte-level BPE of at most ``vocab`` ids: tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 256 + len(SPECIAL_TOKENS) + 1:
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of 260 or more, got {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog and def return self import for while "
    tokenizer.train_from_iterator([text * 4, "naïve 日本語 🙂 tokens\n" * 4], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[1],
    }
    write_json(path / "tokenizer_config.json", settings)


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_shards(path: Path, tensors: Tensors, shards: int) -> None:
    """Write ``tensors`` as one safetensors file, or as several with an index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(path / "model.safetensors.index.json", index)


def edit_config(path: Path, **changes: Any) -> None:
    """Set fields of ``config.json``."""
    file = path / "config.json"
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | changes)


def remove_fields(path: Path, *names: str) -> None:
    """Remove fields of ``config.json``."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {key: value for key, value in config.items() if key not in names})


def edit_tensors(path: Path, edit: Callable[[Tensors], object]) -> None:
    """Apply ``edit`` to the tensors of ``model.safetensors``."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)
