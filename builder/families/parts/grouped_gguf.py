"""Targets with grouped-query attention as GGUF files have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.layer_names import NAMES, taken_experts
from specbuild.builder.checkpoint.gguf.made import by_layer, outer_tensors, renamed, rows_of
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys, attention_fields
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.gguf.rope import LONGROPE_FACTORS, ROPE_FACTORS, rope_fields
from specbuild.builder.checkpoint.source import Tensors

Fields = dict[str, Any]
_NAMES = {**NAMES, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# How the fields of configurations call the number of routed experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def dense_fields(keys: ModelKeys, _model: GgufModel, _fields: Fields) -> Fields:
    """Those of a SwiGLU in every layer."""
    return {"intermediate_size": keys.integer("feed_forward_length")}


@dataclass(frozen=True)
class GroupedGguf:
    """The files of one architecture.

    ``pairs``: rows that RoPE turns stand side by side in the file. ``names`` are names of parts of
    a layer beside those that all have. ``own`` gives the fields of ``config.json`` that only this
    kind has, by those that are known. ``partial``: a part of each head may turn.
    """

    model_type: str
    pairs: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    own: Callable[[ModelKeys, GgufModel, Fields], Fields] = dense_fields
    partial: bool = False

    def config(self, keys: ModelKeys, model: GgufModel) -> Fields:
        """The fields of ``config.json``."""
        fields = {
            "model_type": self.model_type,
            **attention_fields(keys),
            **rope_fields(keys, model.tensors.get(ROPE_FACTORS)),
        }
        head_dim = fields["head_dim"]
        if self.partial:
            turned = keys.integer("rope.dimension_count", head_dim)
            fields["partial_rotary_factor"] = turned / head_dim
        else:
            keys.same("rope.dimension_count", head_dim)
        return fields | self.own(keys, model, fields)

    def tensors(self, model: GgufModel, config: Fields) -> Tensors:
        """The tensors in Hugging Face's layout."""
        found = by_layer(model.tensors)
        for factors in (ROPE_FACTORS, *LONGROPE_FACTORS.values()):
            found.outer.pop(factors, None)
        made = outer_tensors(found.outer)
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
        for layer, parts in found.layers.items():
            prefix = f"model.layers.{layer}."
            if experts is not None:
                made |= taken_experts(parts, prefix, experts)
            if self.pairs:
                made |= _half_split(parts, prefix, heads)
            made |= renamed(parts, prefix, {**_NAMES, **self.names})
        return made

    @property
    def form(self) -> GgufForm:
        """As the registry wants it."""
        return GgufForm(self.config, self.tensors)


def has_biases(model: GgufModel) -> bool:
    """Whether queries have biases."""
    return "blk.0.attn_q.bias" in model.tensors


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
        made[name] = rows_of(name, tensor, partial(_evens_first, heads=count))
    return made


def _evens_first(rows: torch.Tensor, *, heads: int) -> torch.Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
