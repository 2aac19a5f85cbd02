"""What reading a target takes, whatever its family: the result, and the files beside weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.registry import QuantizationSummary
from specbuild.builder.checkpoint.source import SourceTensor, has_file, read_json
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class TextFile(Protocol):
    """A file of tokenizer or chat template: a path, or what is made of a GGUF file's keys."""

    @property
    def name(self) -> str:
        """What it is called in an engine."""
        ...

    @property
    def parent(self) -> Path:
        """Where it comes from."""
        ...

    def read_bytes(self) -> bytes:
        """What it holds."""
        ...


@dataclass(frozen=True)
class MadeText:
    """A text file that no disk holds; ``parent`` is the file that it was made of."""

    parent: Path
    name: str
    data: bytes

    def read_bytes(self) -> bytes:
        """What it holds."""
        return self.data


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target that passed the audit; tensors have the names of the Hugging Face layout.

    With tied embeddings ``lm_head.weight`` is there all the same, its source the embedding.
    ``replaced`` maps tensors that no graph will name to what stands in their place.
    ``source_types`` are those of a GGUF file or a quantized checkpoint: how many tensors by type,
    by kind of tensor. ``quantization`` is None where the configuration names no method.
    ``generation`` is the sampling that the checkpoint recommends.
    """

    geometry: TargetGeometry
    tensors: dict[str, SourceTensor]
    warnings: tuple[str, ...]
    text_files: tuple[TextFile, ...]
    replaced: dict[str, str] = field(default_factory=dict)
    source_types: dict[str, dict[str, int]] = field(default_factory=dict)
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    quantization: QuantizationSummary | None = None


def read_eos(roots: tuple[Path, ...], config: Config) -> tuple[int, ...]:
    """The EOS list of ``generation_config.json``; ``config.json``'s only where that names none."""
    for root in roots:
        file = root / "generation_config.json"
        if has_file(file):
            generation = Config(str(file), "generation_config.json", read_json(file))
            listed = generation.integers("eos_token_id")
            if listed is not None:
                return _in_vocabulary(generation, listed, config.integer("vocab_size"))
    return _in_vocabulary(
        config, config.integers("eos_token_id") or (), config.integer("vocab_size")
    )


def _in_vocabulary(config: Config, ids: tuple[int, ...], vocab: int) -> tuple[int, ...]:
    if any(not 0 <= token < vocab for token in ids):
        raise config.wrong("eos_token_id", f"ids below the vocabulary's {vocab}")
    return ids


def tie_head(path: Path, tensors: dict[str, SourceTensor]) -> None:
    """Make the embedding the head's source; a head of its own must hold the same values."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding is None:
        return  # the audit reports it
    if head is not None and not _same_values(head, embedding):
        raise SpecbuildError(
            f"{path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; set it to "
            "false or remove the tensor"
        )
    tensors[HEAD] = dataclasses.replace(embedding, name=HEAD)


def _same_values(one: SourceTensor, other: SourceTensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.load(), other.load())


def text_files(roots: tuple[Path, ...]) -> tuple[Path, ...]:
    """Tokenizer and chat template, from the first of ``roots`` that has a tokenizer."""
    for root in roots:
        if has_file(root / TEXT_FILES[0]):
            return tuple(root / name for name in TEXT_FILES if has_file(root / name))
    return ()
