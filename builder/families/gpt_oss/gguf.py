"""GGUF files of GPT-OSS. MXFP4 experts stay MXFP4: only the order of their nibbles changes."""

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
    """Return the fields of ``config.json``."""
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
    keys.has("feed_forward_length")  # unused: every feed-forward has experts
    scaling = fields["rope_scaling"]
    # GGUF has no key for `truncate`, which is false in every release.
    fields["rope_scaling"] = (
        {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False}
    )
    if _all_mxfp4(model):
        fields["quantization_config"] = {"quant_method": "mxfp4"}
    return fields


def tensors(model: GgufModel, config: dict[str, Any]) -> Tensors:
    """Return the tensors in Hugging Face's layout."""
    packed = "quantization_config" in config
    grouped = by_layer(model.tensors)
    converted = outer_tensors(grouped.outer)
    for layer, parts in grouped.layers.items():
        prefix = f"model.layers.{layer}."
        converted |= _experts(parts, f"{prefix}mlp.experts.", packed=packed)
        converted |= renamed(parts, prefix, _NAMES)
    return converted


def _all_mxfp4(model: GgufModel) -> bool:
    ends = tuple(f"{part}.weight" for part in (_GATE, _UP, _DOWN))
    kinds = {t.kind.name for name, t in model.tensors.items() if name.endswith(ends)}
    return kinds == {"MXFP4"}


def _experts(parts: dict[str, GgufTensor], prefix: str, *, packed: bool) -> Tensors:
    """Remove the experts' matrices and biases from ``parts``; return them converted."""
    converted: Tensors = {}
    gate, up, down = (parts.get(f"{part}.weight") for part in (_GATE, _UP, _DOWN))
    if gate and up and gate.shape == up.shape and len(gate.shape) == _EXPERTS_AXES:
        converted |= _matrices(f"{prefix}gate_up_proj", [gate, up], packed=packed)
        del parts[f"{_GATE}.weight"], parts[f"{_UP}.weight"]
    if down and len(down.shape) == _EXPERTS_AXES:
        converted |= _matrices(f"{prefix}down_proj", [down], packed=packed)
        del parts[f"{_DOWN}.weight"]
    gate, up, down = (parts.get(f"{part}.bias") for part in (_GATE, _UP, _DOWN))
    if gate and up and gate.shape == up.shape:
        name, shape = f"{prefix}gate_up_proj_bias", (*gate.shape[:-1], 2 * gate.shape[-1])
        converted[name] = made_of(
            name, [gate, up], shape, lambda *rows: torch.stack(rows, -1).flatten(-2)
        )
        del parts[f"{_GATE}.bias"], parts[f"{_UP}.bias"]
    if down:
        name = f"{prefix}down_proj_bias"
        converted[name] = as_it_is(name, parts.pop(f"{_DOWN}.bias"))
    return converted


def _matrices(name: str, parents: Sequence[GgufTensor], *, packed: bool) -> Tensors:
    """Convert one matrix [E, out, in], or two whose rows alternate."""
    experts, rows, columns = parents[0].shape
    rows *= len(parents)
    if not packed:
        return {name: made_of(name, parents, (experts, columns, rows), _interleave_dense)}
    blocks = (experts, rows, columns // parents[0].kind.elements)
    nibbles = partial(_interleave_blocks, parents, _reorder_nibbles, (*blocks, 16))
    scales = partial(_interleave_blocks, parents, lambda raw: raw[..., 0], blocks)
    return {
        tensor.name: tensor
        for tensor in (
            _byte_tensor(f"{name}_blocks", parents, (*blocks, 16), nibbles),
            _byte_tensor(f"{name}_scales", parents, blocks, scales),
        )
    }


def _interleave_dense(*matrices: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of matrices [E, out, in] as one [E, in, out]."""
    return torch.stack(matrices, 2).flatten(1, 2).transpose(1, 2)


def _byte_tensor(
    name: str, parents: Sequence[GgufTensor], shape: tuple[int, ...], load: Any
) -> SourceTensor:
    sources = tuple(parent.name for parent in parents)
    return SourceTensor(name, "U8", shape, sources, load, parents[0].file, None)


def _interleave_blocks(
    parents: Sequence[GgufTensor], read: Any, shape: tuple[int, ...]
) -> torch.Tensor:
    """Apply ``read`` to the blocks of the parents, and interleave the parents' rows."""
    blocks = np.empty((shape[0] * shape[1] // len(parents), len(parents), *shape[2:]), np.uint8)
    for index, parent in enumerate(parents):
        blocks[:, index] = read(read_blocks(parent))
    return torch.from_numpy(blocks.reshape(shape))


def _reorder_nibbles(raw: Bytes) -> Bytes:
    """Convert low nibbles 0–15 and high nibbles 16–31 to pairs, the even one low."""
    codes = raw[..., 1:]
    low, high = codes & 15, codes >> 4
    return np.concatenate(
        [half[..., 0::2] | (half[..., 1::2] << 4) for half in (low, high)], axis=-1
    )


FORM = GgufForm(config, tensors)
