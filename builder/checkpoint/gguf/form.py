"""The interface of a family's GGUF reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.source import Tensors


@dataclass(frozen=True)
class GgufForm:
    """Reads files of one ``general.architecture``.

    ``config`` returns the fields of ``config.json`` except those that all share; ``tensors``
    returns the tensors under Hugging Face's names, by that config.
    """

    config: Callable[[ModelKeys, GgufModel], dict[str, Any]]
    tensors: Callable[[GgufModel, dict[str, Any]], Tensors]
