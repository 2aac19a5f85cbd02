"""DeepSeek and its kin in transformers: how they are loaded, and where they choose experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from specbuild.builder.families.deepseek.variants import VARIANTS


def load_options(_path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The class's own configuration, of the fields of ``config.json``.

    Under another ``model_type`` transformers leaves experts as they were initialised; with a
    padding token it would make that row of the embedding, and of a tied head, 0.
    """
    import transformers

    architecture = VARIANTS[fields["model_type"]].architecture
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    stored = {name: value for name, value in fields.items() if name != "quantization_config"}
    own = {"model_type": kind.model_type, "pad_token_id": None}
    return {"config": kind.from_dict({**stored, **own})}


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; dense layers have none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}
