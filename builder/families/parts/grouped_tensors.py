"""The tensors of a target with grouped-query attention: on disk, and in the engine's forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor, Tensors, remade
from specbuild.builder.families.parts.experts import stacked_experts
from specbuild.builder.families.parts.gated_delta import NAME as LINEAR
from specbuild.builder.families.parts.gated_delta import delta_for_engine, delta_shapes
from specbuild.builder.families.parts.mla_tensors import feed_forward_shapes
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    grouped_attention_shapes,
    prefixed,
    target_shapes,
)
from specbuild.runtime.engine_dir.feed_forward import routed_part
from specbuild.runtime.engine_dir.geometry import TargetGeometry

# How Mixtral and MiniMax call a router and experts.
BLOCK_SPARSE_NAMES = {
    r"block_sparse_moe\.gate\.weight": "mlp.gate.weight",
    r"block_sparse_moe\.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    r"block_sparse_moe\.experts\.(\d+)\.w1\.weight": r"mlp.experts.\1.gate_proj.weight",
    r"block_sparse_moe\.experts\.(\d+)\.w2\.weight": r"mlp.experts.\1.down_proj.weight",
    r"block_sparse_moe\.experts\.(\d+)\.w3\.weight": r"mlp.experts.\1.up_proj.weight",
}


def grouped_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Name on disk → shape and dtypes."""

    def layer(index: int) -> Shapes:
        mlp = prefixed("mlp.", feed_forward_shapes(g.hidden, g.feed_forward(index)))
        if index in g.linear_layers and g.gated_delta is not None:
            return mlp | prefixed(f"{LINEAR}.", delta_shapes(g.hidden, g.gated_delta))
        return mlp | grouped_attention_shapes(g, index)

    shapes = target_shapes(g, layer)
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def grouped_for_engine(tensors: Tensors, g: TargetGeometry, _config: Config) -> Tensors:
    """Audited tensors in the engine's forms.

    The experts of a layer stand together, and so do the projections of linear attention that change
    its state. An output's gate is a projection of its own.
    """
    made = dict(tensors)
    for index in range(g.layers):
        prefix = f"model.layers.{index}."
        moe = routed_part(g.feed_forward(index))
        if moe is not None:
            made |= stacked_experts(made, f"{prefix}mlp.experts.", moe)
        if index in g.linear_layers:
            made |= delta_for_engine(made, index)
        elif g.attention.output_gate:
            made |= split_gate(made.pop(f"{prefix}self_attn.q_proj.weight"), g.q_heads)
    return made


def split_gate(queries: SourceTensor, heads: int) -> Tensors:
    """Queries and output gates of ``q_proj``, whose heads have the rows of both in this order."""

    def part(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: weight.unflatten(0, (heads, 2, -1))[:, place].flatten(0, 1)

    stem = queries.name.removesuffix("q_proj.weight")
    return {
        f"{stem}{name}": remade(f"{stem}{name}", queries, part(place))
        for place, name in enumerate(("q_proj.weight", "gate_proj.weight"))
    }


def whole_norm(tensor: SourceTensor) -> SourceTensor:
    """The weight of a norm that is stored less 1, in fp32: rounded to bf16 it would be another."""
    whole = remade(tensor.name, tensor, lambda weight: 1.0 + weight.float(), dtype="F32")
    return replace(whole, less_1=True)


def renamed_layers(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """The tensors, those of layers under other names: patterns of ``names`` to replacements.

    A pattern matches all that follows ``model.layers.N.``.
    """
    patterns = {re.compile(pattern): to for pattern, to in names.items()}
    made: Tensors = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.\d+\.", name)
        inner = name[layer.end() :] if layer else ""
        for pattern, to in patterns.items():
            match = pattern.fullmatch(inner)
            if layer and match:
                new = f"{layer[0]}{match.expand(to)}"
                made[new] = replace(tensor, name=new)
                break
        else:
            made[name] = tensor
    return made
