"""The number of distinct experts that the tokens of a step select."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.families.registry import target_family
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.streams import embedding_rms, embeddings
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward, routed_part

STEP_TOKENS = (1, 2, 4, 8, 16, 32)
_SAMPLE = 512


@dataclass(frozen=True)
class DistinctExperts:
    """The mean over layers and steps, and the value of uniform routing."""

    tokens: int
    mean: float
    uniform: float


def distinct_experts(model: SynthModel) -> tuple[DistinctExperts, ...]:
    """Return the experts of a layer for steps of 1, 2, 4 … tokens, by the routers' own weights.

    The routers get normed embeddings of consecutive tokens, without the additions of layers. The
    result is empty if no layer has experts.
    """
    g = model.target
    if g.moe is None:
        return ()
    tokens = model.rules.cycle[:_SAMPLE]
    normed = embeddings(model.noise, tokens, g.hidden, model.places).float()
    normed /= embedding_rms(g.hidden)
    routed = [i for i in range(g.layers) if routed_part(g.feed_forward(i)) is not None]
    chosen = [_chosen(model, layer, normed) for layer in routed]
    experts = torch.stack(chosen)  # [layers, sample, E]
    results = []
    for count in STEP_TOKENS:
        steps = experts[:, : len(tokens) // count * count].unflatten(1, (-1, count))
        mean = float(steps.any(dim=2).sum(dim=-1).double().mean())
        results.append(DistinctExperts(count, mean, uniform_distinct(g.moe, count)))
    return tuple(results)


def uniform_distinct(moe: MoeFeedForward, tokens: int) -> float:
    """Return E·(1 − (1 − k/E)^n): the mean of uniform routing."""
    return moe.experts * (1 - (1 - moe.experts_per_token / moe.experts) ** tokens)


def _chosen(model: SynthModel, layer: int, normed: torch.Tensor) -> torch.Tensor:
    """bool [n, E]."""
    tensors = model.target_tensors
    prefix = f"model.layers.{layer}."

    def load(name: str) -> torch.Tensor:
        return tensors[model.origin(f"{prefix}{name}")].load().float()

    moe = model.target.moe
    assert moe is not None
    family = target_family(model.target.model_type)
    assert family.synth is not None
    weight = load("post_attention_layernorm.weight") + family.synth.norms_less
    logits = family.synth.router_logits(load, normed * weight)
    best = logits.topk(moe.experts_per_token, dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, value=True)
