"""Layers behind a model's last one that predict further tokens (MTP), in its own checkpoint."""

from __future__ import annotations

import re

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import SourceTensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Tensors = dict[str, SourceTensor]


def predictors(config: Config) -> int:
    """How many the configuration names, in DeepSeek's spelling or transformers'."""
    older = config.integer("num_nextn_predict_layers", 0, least=0)
    return config.integer("num_mtp_layers", older, least=0)


def split_predictors(tensors: Tensors, layers: int, config: Config) -> tuple[Tensors, Tensors]:
    """The tensors of a model of so many layers, and those of its predictors."""
    end = layers + predictors(config)

    def predicts(name: str) -> bool:
        match = _LAYER.match(name)
        return match is not None and layers <= int(match[1]) < end

    own = {name: tensor for name, tensor in tensors.items() if not predicts(name)}
    return own, {name: tensor for name, tensor in tensors.items() if predicts(name)}


def unused_predictors(predicting: Tensors) -> tuple[str, ...]:
    """A warning, where a checkpoint has some."""
    if not predicting:
        return ()
    numbers = {int(match[1]) for match in map(_LAYER.match, predicting) if match}
    return (
        f"target: layer {', '.join(map(str, sorted(numbers)))} predicts further tokens (MTP) and "
        f"is left out, {len(predicting)} tensors; --draft mtp drafts with it",
    )
