"""The family in transformers: how MiMo and Qwen3-VL's text model are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A MiMo is a Qwen2 with MTP layers beside, Qwen3-VL without images a Qwen3.
CLASSES = {"mimo": "Qwen2ForCausalLM", "qwen3_vl_text": "Qwen3ForCausalLM"}


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as that of such a class; nothing for types that transformers knows."""
    if fields["model_type"] not in CLASSES:
        return {}
    import transformers

    name = CLASSES[fields["model_type"]].replace("ForCausalLM", "Config")
    kind = getattr(transformers, name)
    return {"config": kind.from_dict({**fields, "model_type": kind.model_type})}
