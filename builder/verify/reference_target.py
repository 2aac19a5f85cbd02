"""The target in transformers, fp32, eager: the reference for every stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from specbuild.builder.checkpoint.latents import (
    DOWN,
    OUTPUT,
    UP_KEYS,
    UP_VALUES,
    latent_name,
)
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.registry import target_family
from specbuild.builder.training.frozen_target import load_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TargetStates:
    """The target's values at each row of a path, fp32.

    ``layers[i]`` [T, H] after layer i; ``pre_head`` [T, H] after the final norm; ``logits`` [T, V];
    ``routing_margin``: the smallest distance between a selected and another expert in any layer.
    """

    layers: tuple[np.ndarray, ...]
    pre_head: np.ndarray
    logits: np.ndarray
    routing_margin: float

    def aux_hidden(self, aux_layers: tuple[int, ...]) -> np.ndarray:
        """The concatenated aux layers, [T, aux_layers·H]."""
        return np.concatenate([self.layers[aux_layer] for aux_layer in aux_layers], axis=1)


def _fix_frequencies(model: PreTrainedModel, longest: int) -> None:
    """Rotary embeddings that depend on a length use this one."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary: Any = getattr(model.model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) in ("dynamic", "longrope"):
        init = ROPE_INIT_FUNCTIONS[rotary.rope_type]
        rotary.inv_freq, rotary.attention_scaling = init(rotary.config, "cpu", seq_len=longest)
        rotary.rope_type = "default"


class ReferenceTarget:
    """Runs a path of tokens from its start, without a cache."""

    def __init__(self, path: Path, longest: int = 0) -> None:
        """``longest`` is the engine's longest sequence, whose frequencies apply to all positions.

        Transformers changes some kinds of frequencies when a sequence exceeds the original context;
        an engine has one kind.
        """
        self.model: PreTrainedModel = load_target(path, teacher=False)
        if longest:
            _fix_frequencies(self.model, longest)
        self.model.set_experts_implementation("eager")
        self._seen: dict[Any, torch.Tensor] = {}
        self._reference = target_family(self.model.config.model_type).reference
        self._routers = self._reference.routers(self.model)
        inner = self.model.model
        for i, layer in enumerate(inner.layers):
            layer.register_forward_hook(self._keep(("layer", i)))
        for i, router in self._routers.items():
            router.register_forward_hook(self._keep(("router", i)))
        inner.norm.register_forward_hook(self._keep("pre_head"))

    @torch.no_grad()
    def use_latents(self, dims: Sequence[int], tensors: Mapping[str, SourceTensor]) -> None:
        """Replace K and V of layers with a latent by those rebuilt from it: ``W_c W_lat``.

        Their output projections may be adapted to it.
        """
        for i, dim in enumerate(dims):
            attention = self.model.model.layers[i].self_attn
            if dim:
                attention.o_proj.weight.copy_(tensors[latent_name(i, OUTPUT)].load())
            for projection, up in ((attention.k_proj, UP_KEYS), (attention.v_proj, UP_VALUES)):
                if dim:
                    down = tensors[latent_name(i, DOWN)].load().double()
                    joined = down @ tensors[latent_name(i, up)].load().double()
                    projection.weight.copy_(joined.T)

    def _keep(self, key: Any) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._seen[key] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def run(self, ids: np.ndarray) -> TargetStates:
        """Return the states at every row of ``ids`` [T]."""
        self._seen.clear()
        logits = self.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits
        depth = len(self.model.model.layers)
        return TargetStates(
            layers=tuple(self._seen["layer", i][0].numpy() for i in range(depth)),
            pre_head=self._seen["pre_head"][0].numpy(),
            logits=logits[0].numpy(),
            routing_margin=min(
                (
                    self._reference.margin(router, self._seen["router", i])
                    for i, router in self._routers.items()
                ),
                default=math.inf,
            ),
        )
