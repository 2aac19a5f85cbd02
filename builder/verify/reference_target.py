"""The target in transformers, fp32, eager: the reference for every stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from specbuild.builder.training.frozen_target import load_target

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM


@dataclass(frozen=True)
class TargetStates:
    """What the target computes at each row of a path, fp32.

    ``layers[i]`` [T, H] after layer i; ``pre_head`` [T, H] after the final norm; ``logits`` [T, V];
    ``routing_margin``: the smallest distance between a chosen and an unchosen expert anywhere.
    """

    layers: tuple[np.ndarray, ...]
    pre_head: np.ndarray
    logits: np.ndarray
    routing_margin: float

    def captured(self, taps: tuple[int, ...]) -> np.ndarray:
        """The tapped layers side by side, [T, taps·H]."""
        return np.concatenate([self.layers[tap] for tap in taps], axis=1)


class ReferenceTarget:
    """Runs a literal path of tokens from its start; no cache."""

    def __init__(self, path: Path) -> None:
        self.model: GptOssForCausalLM = load_target(path, families=tuple(_MARGINS))
        self.model.set_experts_implementation("eager")
        self._seen: dict[Any, torch.Tensor] = {}
        self._routers = _routers(self.model)
        inner = self.model.model
        for i, layer in enumerate(inner.layers):
            layer.register_forward_hook(self._keep(("layer", i)))
        for i, router in self._routers.items():
            router.register_forward_hook(self._keep(("router", i)))
        inner.norm.register_forward_hook(self._keep("pre_head"))

    @torch.no_grad()
    def use_latents(self, dims: Sequence[int], tensors: Mapping[str, SourceTensor]) -> None:
        """Makes K and V of the layers with a latent what they are rebuilt of: ``W_c W_lat``.

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
        """The states at every row of ``ids`` [T]."""
        self._seen.clear()
        logits = self.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits
        depth = len(self.model.model.layers)
        return TargetStates(
            layers=tuple(self._seen["layer", i][0].numpy() for i in range(depth)),
            pre_head=self._seen["pre_head"][0].numpy(),
            logits=logits[0].numpy(),
            routing_margin=min(
                (
                    self._margin(router, self._seen["router", i])
                    for i, router in self._routers.items()
                ),
                default=math.inf,
            ),
        )

    def _margin(self, router: nn.Module, router_logits: torch.Tensor) -> float:
        return _MARGINS[self.model.config.model_type](router, router_logits)


def _routers(model: GptOssForCausalLM) -> dict[int, nn.Module]:
    """The routers, by layer; a DeepSeek's first layers have none."""
    if model.config.model_type == "gpt_oss":
        return {i: layer.mlp.router for i, layer in enumerate(model.model.layers)}
    dense = model.config.first_k_dense_replace
    return {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if i >= dense}


def _between(scores: torch.Tensor, chosen: int) -> float:
    """The smallest distance from the last of the ``chosen`` best to the next, in any row."""
    if chosen == scores.shape[-1]:
        return math.inf
    ordered = scores.sort(dim=-1, descending=True).values
    return float((ordered[..., chosen - 1] - ordered[..., chosen]).min())


def _deepseek_margin(router: Any, logits: torch.Tensor) -> float:
    """The smaller of the distances between groups and between experts of the groups taken."""
    scores = logits.sigmoid() + router.e_score_correction_bias
    by_group = scores.unflatten(-1, (router.num_group, -1))
    sums = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
    taken = sums.topk(router.topk_group, dim=-1).indices
    kept = torch.zeros_like(sums).scatter(-1, taken, 1.0).bool().unsqueeze(-1)
    within = by_group.masked_fill(~kept, -torch.inf).flatten(-2)
    return min(_between(sums, router.topk_group), _between(within, router.top_k))


_MARGINS: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "gpt_oss": lambda router, logits: _between(logits, router.top_k),
    "deepseek_v3": _deepseek_margin,
}
