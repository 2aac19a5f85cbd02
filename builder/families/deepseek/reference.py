"""DeepSeek and similar models in transformers: how to load them, and their routers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from specbuild.builder.families.deepseek.variants import VARIANTS


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the model's own class, from the fields of ``config.json``.

    With another ``model_type`` transformers does not load the experts. With a padding token it
    sets this row of the embedding to 0, and of a tied head.
    """
    import transformers

    architecture = VARIANTS[fields["model_type"]].architecture
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    stored = {name: value for name, value in fields.items() if name != "quantization_config"}
    overrides = {"model_type": config_class.model_type, "pad_token_id": None}
    return {"config": config_class.from_dict({**stored, **overrides})}


def routers(model: Any) -> dict[int, nn.Module]:
    """Return the routers by layer; dense layers have none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}
