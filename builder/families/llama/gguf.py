"""Llama, Qwen3 and Qwen3-MoE as GGUF files have them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.layer_names import NAMES, taken_experts
from specbuild.builder.checkpoint.gguf.made import (
    Tensors,
    by_layer,
    made_of,
    outer_tensors,
    renamed,
)
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys, attention_fields
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.gguf.rope import ROPE_FACTORS, rope_fields
from specbuild.runtime.errors import SpecbuildError

_NAMES = {**NAMES, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Grouped:
    """One of them; ``pairs`` says that rows which RoPE turns stand side by side in the file."""

    model_type: str
    pairs: bool = False

    def config(self, keys: ModelKeys, model: GgufModel) -> dict[str, Any]:
        """The fields of ``config.json``."""
        fields = {
            "model_type": self.model_type,
            **attention_fields(keys),
            **rope_fields(keys, model.tensors.get(ROPE_FACTORS)),
            "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        }
        keys.same("rope.dimension_count", fields["head_dim"])
        experts = keys.parts("expert_count", 0)
        if not experts:
            return fields | {"intermediate_size": keys.integer("feed_forward_length")}
        if self.model_type == "llama":
            raise SpecbuildError(
                f"{model.path}: is a Mixtral (llama with {experts} experts), which is not "
                "implemented; of models with experts GPT-OSS, Qwen3-MoE and DeepSeek are read"
            )
        dense = keys.integer("feed_forward_length", 1)
        return fields | {
            "num_experts": experts,
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "intermediate_size": dense,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def tensors(self, model: GgufModel, config: dict[str, Any]) -> Tensors:
        """The tensors in Hugging Face's layout."""
        found = by_layer(model.tensors)
        found.outer.pop(ROPE_FACTORS, None)
        made = outer_tensors(found.outer)
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        for layer, parts in found.layers.items():
            prefix = f"model.layers.{layer}."
            if config.get("num_experts"):
                made |= taken_experts(parts, prefix, config["num_experts"])
            if self.pairs:
                made |= _half_split(parts, prefix, heads)
            made |= renamed(parts, prefix, _NAMES)
        return made


def _half_split(parts: dict[str, GgufTensor], prefix: str, heads: dict[str, int]) -> Tensors:
    """Takes queries and keys out: the rows of each head that RoPE turns, even ones first."""
    made: Tensors = {}
    for given in [part for part in parts if part.rpartition(".")[0] in heads]:
        stem, _, ending = given.rpartition(".")
        tensor, count = parts[given], heads[stem]
        if tensor.shape[0] % (2 * count):
            continue  # for the audit to report
        del parts[given]
        name = f"{prefix}{NAMES[stem]}.{ending}"
        made[name] = made_of(name, [tensor], tensor.shape, partial(_evens_first, heads=count))
    return made


def _evens_first(rows: torch.Tensor, *, heads: int) -> torch.Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _form(made: Grouped) -> GgufForm:
    return GgufForm(made.config, made.tensors)


FORMS = {
    "llama": _form(Grouped("llama", pairs=True)),
    "qwen3": _form(Grouped("qwen3")),
    "qwen3moe": _form(Grouped("qwen3_moe")),
}
