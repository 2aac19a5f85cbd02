"""The result of reading a target, for any family, and the files besides weights."""

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
    """A file of tokenizer or chat template: a path, or generated from a GGUF file's keys."""

    @property
    def name(self) -> str:
        """Its name in an engine."""
        ...

    @property
    def parent(self) -> Path:
        """Its source."""
        ...

    def read_bytes(self) -> bytes:
        """Return its contents."""
        ...


@dataclass(frozen=True)
class MadeText:
    """A text file that is not on disk; ``parent`` is the file from which it was generated."""

    parent: Path
    name: str
    data: bytes

    def read_bytes(self) -> bytes:
        """Return its contents."""
        return self.data


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target that passed the audit; tensors have the names of the Hugging Face layout.

    With tied embeddings ``lm_head.weight`` exists too, and its source is the embedding.
    ``replaced`` maps tensors that no graph names to their replacements. ``source_types`` counts the
    tensors of a GGUF file or a quantized checkpoint by type, by kind of tensor. ``quantization`` is
    None if the configuration names no method. ``generation`` is the sampling that the checkpoint
    recommends.
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
    """Return the EOS list of ``generation_config.json``, or that of ``config.json``."""
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
    """Make the embedding the head's source; a separate head must have the same values."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding is None:
        return  # The audit reports it.
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
    """Return tokenizer and chat template, from the first of ``roots`` that has a tokenizer."""
    for root in roots:
        if has_file(root / TEXT_FILES[0]):
            return tuple(root / name for name in TEXT_FILES if has_file(root / name))
    return ()
