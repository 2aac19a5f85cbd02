"""MiMo and Qwen3-VL's text model in transformers: how to load them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# MiMo is a Qwen2 with MTP layers. Qwen3-VL without images is a Qwen3.
CLASSES = {"mimo": "Qwen2ForCausalLM", "qwen3_vl_text": "Qwen3ForCausalLM"}


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the equivalent class; {} for types that transformers supports."""
    if fields["model_type"] not in CLASSES:
        return {}
    import transformers

    name = CLASSES[fields["model_type"]].replace("ForCausalLM", "Config")
    config_class = getattr(transformers, name)
    return {"config": config_class.from_dict({**fields, "model_type": config_class.model_type})}
