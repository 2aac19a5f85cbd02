"""GGUF files of Qwen3.5 and Qwen3-Next.

Checkpoints group value heads by key head. GGUF files of Qwen3.5 interleave the groups. Those of
Qwen3-Next keep the order, but split the projections into two tensors: one has queries, keys and
values of all heads, the other has the gate. Both store the decay's factor without a logarithm,
norm weights in full, and the convolution without its axis of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.checkpoint.gguf.model_keys import ModelKeys
from specbuild.builder.checkpoint.gguf.parts import GgufModel
from specbuild.builder.checkpoint.source import SourceTensor, Tensors, remade
from specbuild.builder.families.parts.grouped_gguf import Fields, GroupedGguf, dense_fields
from specbuild.builder.families.qwen3_5.checkpoint import DENSE, MOE, NEXT, is_stored_less_1

_NAMES = {
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def _delta_fields(keys: ModelKeys, shared: Fields) -> Fields:
    """Return the fields of linear attention; the layers of a file include the MTP layer."""
    predictors = keys.parts("nextn_predict_layers", 0)
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        raise keys.fields.wrong("ssm.inner_size", f"a multiple of {heads} value heads")
    key_heads = keys.integer("ssm.group_count")
    if heads % key_heads:
        raise keys.fields.wrong("ssm.group_count", f"a divisor of {heads} value heads")
    keys.has("rope.dimension_sections")  # no effect: text has the same position in all sections
    return {
        "full_attention_interval": keys.parts("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "num_hidden_layers": max(1, shared["num_hidden_layers"] - predictors),
        "num_nextn_predict_layers": predictors,
    }


def _dense(keys: ModelKeys, model: GgufModel, shared: Fields) -> Fields:
    return dense_fields(keys, model, shared) | _delta_fields(keys, shared)


def _experts(keys: ModelKeys, _model: GgufModel, shared: Fields) -> Fields:
    inner = keys.integer("expert_feed_forward_length")
    keys.has("feed_forward_length")
    return _delta_fields(keys, shared) | {
        "moe_intermediate_size": inner,
        "num_experts": keys.parts("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", inner),
    }


@dataclass(frozen=True)
class _Heads:
    """The heads of linear attention; ``shared`` is the number of value heads of a key head."""

    keys: int
    shared: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Heads:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        widths = config["linear_key_head_dim"], config["linear_value_head_dim"]
        return cls(keys, values // keys, *widths)

    def group_values(self, values: torch.Tensor, width: int, axis: int = 0) -> torch.Tensor:
        """Group value heads of ``width`` values along an axis by their key head."""
        interleaved = values.unflatten(axis, (self.shared, self.keys, width))
        return interleaved.transpose(axis, axis + 1).flatten(axis, axis + 2)

    def group_after_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Group the rows of values; those of queries and keys stay."""
        keys = 2 * self.keys * self.key_width
        return torch.cat([rows[:keys], self.group_values(rows[keys:], self.value_width)])

    def group_by_key_head(self, qkv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Group the rows of queries, keys, values and the gate by key head."""
        keys = self.keys * self.key_width
        parts = (*qkv.split([keys, keys, len(qkv) - 2 * keys]), gate)
        return torch.cat([part.unflatten(0, (self.keys, -1)) for part in parts], 1).flatten(0, 1)

    def conversion(self, part: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the conversion to a checkpoint's tensor; None if both are the same."""
        by_head = partial(self.group_values, width=1)
        conversions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "in_proj_qkv.weight": self.group_after_keys,
            "in_proj_z.weight": partial(self.group_values, width=self.value_width),
            "in_proj_a.weight": by_head,
            "in_proj_b.weight": by_head,
            "out_proj.weight": partial(self.group_values, width=self.value_width, axis=1),
            "conv1d.weight": lambda rows: self.group_after_keys(rows).unsqueeze(1),
            "dt_bias": by_head,
            "A_log": lambda factor: by_head(factor.float().neg().log()),
        }
        return conversions.get(part)


# The conversions to tensors of Qwen3-Next's checkpoints.
_NEXT_CONVERSIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conv1d.weight": lambda rows: rows.unsqueeze(1),
    "A_log": lambda factor: factor.float().neg().log(),
}


def _tensors(form: GroupedGguf, model: GgufModel, config: Fields) -> Tensors:
    heads, tensors = _Heads.of(config), form.tensors(model, config)
    is_next = form.model_type == NEXT
    conversion = _NEXT_CONVERSIONS.get if is_next else heads.conversion
    if is_next:
        _join_projections(tensors, heads)
    return {name: _convert(name, tensor, conversion) for name, tensor in tensors.items()}


def _join_projections(tensors: Tensors, heads: _Heads) -> None:
    """Replace a layer's two tensors of projections with Qwen3-Next's single one.

    If one is missing or has an unexpected number of rows, both stay, for the audit.
    """
    for qkv_name in [name for name in tensors if name.endswith("in_proj_qkv.weight")]:
        stem = qkv_name.removesuffix("qkv.weight")
        qkv, gate = tensors[qkv_name], tensors.get(f"{stem}z.weight")
        if gate is None:
            continue
        empty = [torch.empty(part.shape, device="meta") for part in (qkv, gate)]
        try:
            shape = tuple(heads.group_by_key_head(*empty).shape)
        except RuntimeError:
            continue
        del tensors[qkv_name], tensors[f"{stem}z.weight"]
        tensors[f"{stem}qkvz.weight"] = SourceTensor(
            name=f"{stem}qkvz.weight",
            dtype=qkv.dtype if qkv.dtype == gate.dtype else "F32",
            shape=shape,
            sources=(*qkv.sources, *gate.sources),
            load=partial(_load_by_key_head, heads, qkv, gate),
            file=None,
            offset=None,
        )


def _load_by_key_head(heads: _Heads, qkv: SourceTensor, gate: SourceTensor) -> torch.Tensor:
    loaded = qkv.load(), gate.load()
    if qkv.dtype != gate.dtype:
        loaded = loaded[0].float(), loaded[1].float()
    return heads.group_by_key_head(*loaded)


def _convert(
    name: str,
    tensor: SourceTensor,
    conversion: Callable[[str], Callable[[torch.Tensor], torch.Tensor] | None],
) -> SourceTensor:
    """Convert a tensor to a checkpoint's; one of an unexpected shape stays, for the audit."""
    _, linear, part = name.partition(".linear_attn.")
    convert = conversion(part) if linear else None
    if convert is None and is_stored_less_1(name):
        return remade(name, tensor, lambda weight: weight - 1.0)
    if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
        return remade(name, tensor, lambda row: row.unsqueeze(0))
    if convert is None:
        return tensor
    try:
        return remade(name, tensor, convert, dtype="F32" if part == "A_log" else None)
    except RuntimeError:
        return tensor


def _form(grouped: GroupedGguf) -> GgufForm:
    return GgufForm(grouped.config, partial(_tensors, grouped))


FORMS = {
    "qwen35": _form(GroupedGguf(DENSE, names=_NAMES, own=_dense, partial=True)),
    "qwen3next": _form(GroupedGguf(NEXT, names=_NAMES, own=_experts, partial=True)),
    "qwen35moe": _form(GroupedGguf(MOE, names=_NAMES, own=_experts, partial=True)),
}
