"""GPT-OSS: its experts stay in MXFP4 where the file has them so, only their nibbles move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from specbuild.builder.checkpoint.gguf.blocks import Bytes
from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.layer_names import NAMES
from specbuild.builder.checkpoint.gguf.made import (
    as_it_is,
    by_layer,
    made_of,
    outer_tensors,
    renamed,
)
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys, attention_fields
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.gguf.rope import rope_fields
from specbuild.builder.checkpoint.gguf.values import read_blocks
from specbuild.builder.checkpoint.source import SourceTensor, Tensors

_NAMES = {
    **NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "attn_sinks.weight": "self_attn.sinks",
}
_GATE, _UP, _DOWN = (f"ffn_{part}_exps" for part in ("gate", "up", "down"))
_EXPERTS_AXES = 3


def config(keys: ModelKeys, model: GgufModel) -> dict[str, Any]:
    """The fields of ``config.json``."""
    fields = {
        "model_type": "gpt_oss",
        **attention_fields(keys),
        **rope_fields(keys),
        "attention_bias": True,
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.parts("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
    }
    keys.same("rope.dimension_count", fields["head_dim"])
    keys.has("feed_forward_length")  # there is no feed-forward but the experts
    scaling = fields["rope_scaling"]
    # The file does not say what all of these models do.
    fields["rope_scaling"] = (
        {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False}
    )
    if _all_mxfp4(model):
        fields["quantization_config"] = {"quant_method": "mxfp4"}
    return fields


def tensors(model: GgufModel, config: dict[str, Any]) -> Tensors:
    """The tensors in Hugging Face's layout."""
    packed = "quantization_config" in config
    found = by_layer(model.tensors)
    made = outer_tensors(found.outer)
    for layer, parts in found.layers.items():
        prefix = f"model.layers.{layer}."
        made |= _experts(parts, f"{prefix}mlp.experts.", packed=packed)
        made |= renamed(parts, prefix, _NAMES)
    return made


def _all_mxfp4(model: GgufModel) -> bool:
    ends = tuple(f"{part}.weight" for part in (_GATE, _UP, _DOWN))
    kinds = {t.kind.name for name, t in model.tensors.items() if name.endswith(ends)}
    return kinds == {"MXFP4"}


def _experts(parts: dict[str, GgufTensor], prefix: str, *, packed: bool) -> Tensors:
    """Takes the experts' matrices and biases out of ``parts``."""
    made: Tensors = {}
    gate, up, down = (parts.get(f"{part}.weight") for part in (_GATE, _UP, _DOWN))
    if gate and up and gate.shape == up.shape and len(gate.shape) == _EXPERTS_AXES:
        made |= _matrices(f"{prefix}gate_up_proj", [gate, up], packed=packed)
        del parts[f"{_GATE}.weight"], parts[f"{_UP}.weight"]
    if down and len(down.shape) == _EXPERTS_AXES:
        made |= _matrices(f"{prefix}down_proj", [down], packed=packed)
        del parts[f"{_DOWN}.weight"]
    gate, up, down = (parts.get(f"{part}.bias") for part in (_GATE, _UP, _DOWN))
    if gate and up and gate.shape == up.shape:
        name, shape = f"{prefix}gate_up_proj_bias", (*gate.shape[:-1], 2 * gate.shape[-1])
        made[name] = made_of(
            name, [gate, up], shape, lambda *rows: torch.stack(rows, -1).flatten(-2)
        )
        del parts[f"{_GATE}.bias"], parts[f"{_UP}.bias"]
    if down:
        name = f"{prefix}down_proj_bias"
        made[name] = as_it_is(name, parts.pop(f"{_DOWN}.bias"))
    return made


def _matrices(name: str, parents: Sequence[GgufTensor], *, packed: bool) -> Tensors:
    """One matrix [E, out, in], or two whose rows alternate."""
    experts, rows, columns = parents[0].shape
    rows *= len(parents)
    if not packed:
        return {name: made_of(name, parents, (experts, columns, rows), _dense)}
    blocks = (experts, rows, columns // parents[0].kind.elements)
    nibbles = partial(_packed, parents, _nibbles, (*blocks, 16))
    scales = partial(_packed, parents, lambda raw: raw[..., 0], blocks)
    return {
        made.name: made
        for made in (
            _bytes(f"{name}_blocks", parents, (*blocks, 16), nibbles),
            _bytes(f"{name}_scales", parents, blocks, scales),
        )
    }


def _dense(*matrices: torch.Tensor) -> torch.Tensor:
    """[E, out, in] each, as one [E, in, out]."""
    return torch.stack(matrices, 2).flatten(1, 2).transpose(1, 2)


def _bytes(
    name: str, parents: Sequence[GgufTensor], shape: tuple[int, ...], load: Any
) -> SourceTensor:
    sources = tuple(parent.name for parent in parents)
    return SourceTensor(name, "U8", shape, sources, load, parents[0].file, None)


def _packed(parents: Sequence[GgufTensor], take: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """What ``take`` takes of every block, the rows of the parents alternating."""
    made = np.empty((shape[0] * shape[1] // len(parents), len(parents), *shape[2:]), np.uint8)
    for place, parent in enumerate(parents):
        made[:, place] = take(read_blocks(parent))
    return torch.from_numpy(made.reshape(shape))


def _nibbles(raw: Bytes) -> Bytes:
    """Nibbles 0–15 low and 16–31 high, as pairs with the even one low."""
    codes = raw[..., 1:]
    low, high = codes & 15, codes >> 4
    return np.concatenate(
        [half[..., 0::2] | (half[..., 1::2] << 4) for half in (low, high)], axis=-1
    )


FORM = GgufForm(config, tensors)
