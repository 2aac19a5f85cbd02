"""Layers that predict further tokens (MTP), in the checkpoint of the model that they belong to."""

from __future__ import annotations

import re

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import Tensors

# Behind the model's last layer, or in a list of their own.
_LAYER = re.compile(r"model\.(layers|mtp_layers)\.(\d{1,6})\.")
# Qwen's stand beside the model, whether its configuration counts them or not.
BESIDE = "mtp."
_BESIDE_LAYER = re.compile(r"mtp\.layers\.(\d{1,6})\.")


def predictors(config: Config) -> int:
    """How many the configuration names, in DeepSeek's spelling, transformers' or Qwen's."""
    names = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    return max(config.count(name, 0, least=0) for name in names)


def split_predictors(tensors: Tensors, layers: int, config: Config) -> tuple[Tensors, Tensors]:
    """The tensors of a model of so many layers, and those of its predictors."""
    count = predictors(config)

    def predicts(name: str) -> bool:
        match = _LAYER.match(name)
        if match is None:
            return name.startswith(BESIDE)
        first = layers if match[1] == "layers" else 0
        return first <= int(match[2]) < first + count

    own = {name: tensor for name, tensor in tensors.items() if not predicts(name)}
    return own, {name: tensor for name, tensor in tensors.items() if predicts(name)}


def unused_predictors(predicting: Tensors) -> tuple[str, ...]:
    """A warning, where a checkpoint has some."""
    if not predicting:
        return ()
    numbers = {int(match[2]) for match in map(_LAYER.match, predicting) if match}
    numbers |= {int(match[1]) for match in map(_BESIDE_LAYER.match, predicting) if match}
    return (
        f"target: layer {', '.join(map(str, sorted(numbers)))} predicts further tokens (MTP) and "
        f"is left out, {len(predicting)} tensors; --draft mtp drafts with it",
    )
