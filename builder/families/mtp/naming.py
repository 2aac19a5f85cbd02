"""The names of an MTP layer's tensors in checkpoints; engines use DeepSeek's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Naming:
    """The names in one kind of checkpoint; the first layer has the prefix ``prefix``.

    ``{layers}`` in the prefix is the model's number of layers. ``modules`` maps engines' names to
    different names in the checkpoint, both within the layer. All other modules have the prefix
    ``block``. ``architecture`` is the layer's name as a model. With ``hidden_first`` the projection
    reads the hidden state before the embedding. With ``norms_less_1`` the weights of norms are
    stored minus 1.
    """

    architecture: str
    prefix: str
    modules: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    block: str = ""
    norms_less_1: bool = False

    def first(self, layers: int) -> str:
        """Return the prefix of the first layer."""
        return self.prefix.format(layers=layers)

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of an engine's tensor, both within the layer."""
        module, _, part = name.rpartition(".")
        return f"{self.modules.get(module, f'{self.block}{module}')}.{part}"

    def engine_name(self, stored: str) -> str:
        """Return the engine's name of a checkpoint's tensor, both within the layer."""
        module, _, part = stored.rpartition(".")
        engine_modules = {checkpoint: engine for engine, checkpoint in self.modules.items()}
        return f"{engine_modules.get(module, module.removeprefix(self.block))}.{part}"


DEEPSEEK = Naming("DeepSeekMTPModel", "model.layers.{layers}.")
# XiaomiMiMo/MiMo-7B.
MIMO = Naming(
    "MiMoMTPModel",
    "model.mtp_layers.0.",
    {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    },
    hidden_first=True,
)
# Qwen3.5 and Qwen3-Next.
QWEN = Naming(
    "Qwen3_5MTPModel",
    "mtp.",
    {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    },
    block="layers.0.",
    norms_less_1=True,
)
# By model type, for models without MLA.
NAMINGS = {
    "mimo": MIMO,
    "glm4_moe": DEEPSEEK,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": QWEN,
}
PROJECTION = "eh_proj.weight"


def embedding_first(projection: torch.Tensor) -> torch.Tensor:
    """Reorder ``eh_proj`` [H, 2H] of a layer that reads the hidden state first."""
    hidden, embedding = projection.chunk(2, dim=1)
    return torch.cat([embedding, hidden], dim=1)
