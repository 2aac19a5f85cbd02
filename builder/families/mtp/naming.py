"""How checkpoints name the tensors of an MTP layer; engines have DeepSeek's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Naming:
    """The first layer of a model with so many ``{layers}`` stands under ``prefix``.

    ``modules`` maps engines' names within it to the checkpoint's, where these differ.
    ``architecture`` is what the layer is called as a model. ``hidden_first``: the projection reads
    the hidden state in front of the embedding. ``block`` is what the names of all other modules
    begin with. ``norms_less_1``: the weights of norms are stored less 1.
    """

    architecture: str
    prefix: str
    modules: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    block: str = ""
    norms_less_1: bool = False

    def first(self, layers: int) -> str:
        """What the names of the first layer begin with."""
        return self.prefix.format(layers=layers)

    def stored(self, name: str) -> str:
        """The checkpoint's name of an engine's tensor, both within the layer."""
        module, _, part = name.rpartition(".")
        return f"{self.modules.get(module, f'{self.block}{module}')}.{part}"

    def own(self, stored: str) -> str:
        """The engine's name of a checkpoint's tensor, both within the layer."""
        module, _, part = stored.rpartition(".")
        ours = {there: here for here, there in self.modules.items()}
        return f"{ours.get(module, module.removeprefix(self.block))}.{part}"


DEEPSEEK = Naming("DeepSeekMTPModel", "model.layers.{layers}.")
# Of XiaomiMiMo/MiMo-7B.
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
# Of Qwen3.5 and Qwen3-Next.
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
# By model type, of models without MLA.
NAMINGS = {
    "mimo": MIMO,
    "glm4_moe": DEEPSEEK,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": QWEN,
}
PROJECTION = "eh_proj.weight"


def embedding_first(projection: torch.Tensor) -> torch.Tensor:
    """``eh_proj`` [H, 2H] of one that reads the hidden state first."""
    hidden, embedding = projection.chunk(2, dim=1)
    return torch.cat([embedding, hidden], dim=1)
