"""A GGUF file as a checkpoint: the fields of ``config.json``, tensors, and files of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel, open_model
from specbuild.builder.checkpoint.gguf.tokenizer import text_files
from specbuild.builder.checkpoint.gguf.vocabulary import Vocabulary, end_tokens, read_vocabulary
from specbuild.builder.checkpoint.source import Tensors
from specbuild.runtime.errors import SpecbuildError

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class GgufCheckpoint:
    """The opened files of a model: headers are read, tensors when they are loaded."""

    model: GgufModel
    config: dict[str, Any]
    tensors: Tensors
    vocabulary: Vocabulary | None

    def text_files(self) -> dict[str, bytes]:
        """Return tokenizer and chat template by file name; none if the file has no vocabulary."""
        if self.vocabulary is None:
            return {}
        return text_files(self.vocabulary, self.model.keys)


def open_gguf(path: Path, forms: Mapping[str, GgufForm]) -> GgufCheckpoint:
    """Open the model at ``path``, one file or the first of several; ``forms`` by architecture.

    Raises SpecbuildError if it is damaged, of an unsupported architecture, or no model.
    """
    model = open_model(path)
    name = model.keys.get("general.architecture")
    form = forms.get(name) if isinstance(name, str) else None
    if form is None:
        raise SpecbuildError(
            f"{path}: general.architecture {name!r} is not read (read: {', '.join(forms)})"
        )
    kind = model.keys.get("general.type", "model")
    if kind != "model":
        raise SpecbuildError(f"{path}: is of general.type {kind!r}, not a whole model")
    assert isinstance(name, str)
    keys = ModelKeys(str(path), name, model.keys)
    config = form.config(keys, model) | _shared_fields(model)
    vocabulary = read_vocabulary(str(path), model.keys, config["vocab_size"])
    # Keys that were never read are unknown fields, and treated as such.
    config |= {"eos_token_id": end_tokens(vocabulary) if vocabulary else [], **keys.left}
    return GgufCheckpoint(model, config, form.tensors(model, config), vocabulary)


def _shared_fields(model: GgufModel) -> dict[str, Any]:
    embedding = model.tensors.get(_EMBEDDING)
    if embedding is None:
        raise SpecbuildError(
            f"{model.path}: has no tensor {_EMBEDDING}; it is not a whole model, or one part of it"
        )
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": _HEAD not in model.tensors,
    }
