"""Targets with grouped-query attention in GGUF files."""

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
# The names of the number of routed experts in configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def dense_fields(keys: ModelKeys, _model: GgufModel, _fields: Fields) -> Fields:
    """Return the fields of a SwiGLU in every layer."""
    return {"intermediate_size": keys.integer("feed_forward_length")}


@dataclass(frozen=True)
class GroupedGguf:
    """The files of one architecture.

    With ``pairs`` rotated rows are adjacent in the file. ``names`` are additional names of parts of
    a layer. ``own`` returns the fields of ``config.json`` that only this architecture has. With
    ``partial`` only a part of each head can be rotated.
    """

    model_type: str
    pairs: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    own: Callable[[ModelKeys, GgufModel, Fields], Fields] = dense_fields
    partial: bool = False

    def config(self, keys: ModelKeys, model: GgufModel) -> Fields:
        """Return the fields of ``config.json``."""
        fields = {
            "model_type": self.model_type,
            **attention_fields(keys),
            **rope_fields(keys, model.tensors.get(ROPE_FACTORS)),
        }
        head_dim = fields["head_dim"]
        if self.partial:
            rotary_dim = keys.integer("rope.dimension_count", head_dim)
            fields["partial_rotary_factor"] = rotary_dim / head_dim
        else:
            keys.same("rope.dimension_count", head_dim)
        return fields | self.own(keys, model, fields)

    def tensors(self, model: GgufModel, config: Fields) -> Tensors:
        """Return the tensors in Hugging Face's layout."""
        file_tensors = by_layer(model.tensors)
        for factors in (ROPE_FACTORS, *LONGROPE_FACTORS.values()):
            file_tensors.outer.pop(factors, None)
        converted = outer_tensors(file_tensors.outer)
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
        for layer, parts in file_tensors.layers.items():
            prefix = f"model.layers.{layer}."
            if experts is not None:
                converted |= taken_experts(parts, prefix, experts)
            if self.pairs:
                converted |= _half_split(parts, prefix, heads)
            converted |= renamed(parts, prefix, {**_NAMES, **self.names})
        return converted

    @property
    def form(self) -> GgufForm:
        """The entry for the registry."""
        return GgufForm(self.config, self.tensors)


def has_biases(model: GgufModel) -> bool:
    """Return whether queries have biases."""
    return "blk.0.attn_q.bias" in model.tensors


def _half_split(parts: dict[str, GgufTensor], prefix: str, heads: dict[str, int]) -> Tensors:
    """Remove queries and keys, and return them with even rotated rows first in each head."""
    converted: Tensors = {}
    for part_name in [part for part in parts if part.rpartition(".")[0] in heads]:
        stem, _, ending = part_name.rpartition(".")
        tensor, count = parts[part_name], heads[stem]
        if tensor.shape[0] % (2 * count):
            continue  # for the audit to report
        del parts[part_name]
        name = f"{prefix}{NAMES[stem]}.{ending}"
        converted[name] = rows_of(name, tensor, partial(_evens_first, heads=count))
    return converted


def _evens_first(rows: torch.Tensor, *, heads: int) -> torch.Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
