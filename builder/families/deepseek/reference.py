"""DeepSeek and its kin in transformers: how they are loaded, and where they choose experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.deepseek.variants import VARIANTS
from specbuild.builder.families.parts.routing_margin import choice_margin
from specbuild.builder.families.parts.stored_weights import scale_block, stored_weights


def load_options(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The class's own configuration, of the fields of ``config.json``; FP8 weights as fp32.

    Under another ``model_type`` transformers leaves experts as they were initialised; with a
    padding token it would make that row of the embedding, and of a tied head, 0. Its own reader of
    FP8 refuses blocks that are cut off at an edge.
    """
    import transformers

    architecture = VARIANTS[fields["model_type"]].architecture
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    stored = {name: value for name, value in fields.items() if name != "quantization_config"}
    own = {"model_type": kind.model_type, "pad_token_id": None}
    options = {"config": kind.from_dict({**stored, **own})}
    block = scale_block(fields)
    if block is None:
        return options
    return options | {
        "pretrained_model_name_or_path": None,
        "state_dict": stored_weights(path, block),
    }


def routers(model: Any) -> dict[int, nn.Module]:
    """The routers, by layer; dense layers have none."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


def routing_margin(router: Any, logits: torch.Tensor) -> float:
    """The smaller of the distances between groups and between experts of the groups taken."""
    if hasattr(router, "e_score_correction_bias"):
        scores, summed = logits.sigmoid() + router.e_score_correction_bias, 2
        grouped = True
    else:  # DeepSeek-V2: by a softmax, whose order is that of the logits
        scores, summed = logits, 1
        grouped = router.topk_method == "group_limited_greedy"
    if not grouped:
        return choice_margin(scores, router.top_k)
    by_group = scores.unflatten(-1, (router.num_group, -1))
    sums = by_group.topk(min(summed, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
    taken = sums.topk(router.topk_group, dim=-1).indices
    kept = torch.zeros_like(sums).scatter(-1, taken, 1.0).bool().unsqueeze(-1)
    within = by_group.masked_fill(~kept, -torch.inf).flatten(-2)
    groups = choice_margin(sums, router.topk_group)
    return min(groups, choice_margin(within, router.top_k))
