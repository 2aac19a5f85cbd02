"""The text part of a multimodal checkpoint: a section of its configuration, and its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import HEAD

SECTION = "text_config"
# Prefixes of tensors of the text part, and their names in text models.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
# Fields of a configuration about the complete model, and therefore its text part.
_SHARED = ("eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype", "dtype")


def has_text_part(fields: Mapping[str, Any]) -> bool:
    """Return whether these are the fields of a model around a text model."""
    section = fields.get(SECTION)
    return isinstance(section, dict) and isinstance(section.get("model_type"), str)


def text_config(config: Config, tensors: Mapping[str, SourceTensor]) -> Config:
    """Return the configuration of the text part; its ``tensors`` show whether it has a head."""
    section = config.section(SECTION)
    shared = {name: config.get(name) for name in _SHARED if config.get(name) is not None}
    # Releases with a head rely on a default that ties it.
    own = {"tie_word_embeddings": False} if HEAD in tensors else {}
    fields = {**section.fields, **shared, **own}
    fields.pop("architectures", None)
    return Config(section.where, section.label, fields)


def text_tensors(
    tensors: Mapping[str, SourceTensor],
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Return the tensors of the text part under its own names, and a warning with the others."""
    text: dict[str, SourceTensor] = {}
    left_out: Counter[str] = Counter()
    for name, tensor in tensors.items():
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is None:
            outer = name.removeprefix("model.").partition(".")[0]
            left_out[outer] += 1
            continue
        new = _PREFIXES[prefix] + name.removeprefix(prefix)
        text[new] = replace(tensor, name=new)
    if not left_out:
        return text, ()
    parts = ", ".join(f"{part} ({count} tensors)" for part, count in sorted(left_out.items()))
    return text, (f"target: only the text part is read; left out: {parts}",)
