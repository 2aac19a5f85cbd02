"""The family in transformers: how MiMo is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A MiMo is a Qwen2 with MTP layers beside.
CLASSES = {"mimo": "Qwen2ForCausalLM"}


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """MiMo's configuration as that of its class; nothing for types that transformers knows."""
    if fields["model_type"] not in CLASSES:
        return {}
    import transformers

    own = {"model_type": transformers.Qwen2Config.model_type}
    return {"config": transformers.Qwen2Config.from_dict({**fields, **own})}
