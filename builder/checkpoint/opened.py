"""A target's checkpoint, opened: a directory of safetensors, or GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.generation import directory_defaults, gguf_defaults
from specbuild.builder.checkpoint.gguf.checkpoint import GgufCheckpoint, open_gguf
from specbuild.builder.checkpoint.gguf.container import is_gguf
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.made import types_by_kind
from specbuild.builder.checkpoint.quantization.modelopt import with_modelopt
from specbuild.builder.checkpoint.source import SourceTensor, open_directory, read_config
from specbuild.builder.checkpoint.target_parts import MadeText, TextFile, text_files
from specbuild.builder.checkpoint.text_part import has_text_part, text_config, text_tensors
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults

Roots = tuple[Path, ...]


@dataclass(frozen=True)
class OpenedTarget:
    """The configuration, what reads the tensors' headers, and the files of text.

    Those of a directory lie in the first of some folders that has them. ``source_types`` counts the
    types of a GGUF file's tensors, by kind; empty for a directory. ``generation`` gives the
    sampling that the checkpoint recommends, and warnings. ``is_text_part``: the checkpoint is a
    multimodal model's, of which ``warnings`` name what is left out.
    """

    config: Config
    tensors: Callable[[], dict[str, SourceTensor]]
    text_files: Callable[[Roots], tuple[TextFile, ...]]
    source_types: dict[str, dict[str, int]] = field(default_factory=dict)
    generation: Callable[[Roots], tuple[GenerationDefaults, tuple[str, ...]]] = directory_defaults
    is_text_part: bool = False
    warnings: tuple[str, ...] = ()


def open_target(path: Path, forms: Mapping[str, GgufForm]) -> OpenedTarget:
    """Opens what ``--model`` names; ``forms`` are those of GGUF files, by architecture.

    Raises SpecbuildError where it is no checkpoint.
    """
    if not is_gguf(path):
        fields = with_modelopt(path, read_config(path))
        config = Config(str(path / "config.json"), "target config.json", fields)
        if has_text_part(config.fields):
            tensors, warnings = text_tensors(open_directory(path))
            return OpenedTarget(
                text_config(config, tensors),
                lambda: dict(tensors),
                text_files,
                is_text_part=True,
                warnings=warnings,
            )
        return OpenedTarget(config, partial(open_directory, path), text_files)
    opened = open_gguf(path, forms)
    return OpenedTarget(
        Config(str(path), "target GGUF", opened.config),
        lambda: dict(opened.tensors),
        lambda _: _made_texts(path, opened),
        types_by_kind(opened.model.tensors),
        lambda _: gguf_defaults(opened.model.keys),
    )


def _made_texts(path: Path, opened: GgufCheckpoint) -> tuple[TextFile, ...]:
    return tuple(MadeText(path, name, data) for name, data in opened.text_files().items())
