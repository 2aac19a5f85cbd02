"""What a family says of its GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.source import Tensors


@dataclass(frozen=True)
class GgufForm:
    """How files of one ``general.architecture`` are read.

    ``config`` gives the fields of ``config.json`` but those that are the same for all, ``tensors``
    the tensors under their names in Hugging Face's layout, by that config.
    """

    config: Callable[[ModelKeys, GgufModel], dict[str, Any]]
    tensors: Callable[[GgufModel, dict[str, Any]], Tensors]
