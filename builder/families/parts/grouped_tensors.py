"""The tensors of a target with grouped-query attention, on disk and in the engine's form."""

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

# The names of routers and experts in Mixtral and MiniMax.
BLOCK_SPARSE_NAMES = {
    r"block_sparse_moe\.gate\.weight": "mlp.gate.weight",
    r"block_sparse_moe\.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    r"block_sparse_moe\.experts\.(\d+)\.w1\.weight": r"mlp.experts.\1.gate_proj.weight",
    r"block_sparse_moe\.experts\.(\d+)\.w2\.weight": r"mlp.experts.\1.down_proj.weight",
    r"block_sparse_moe\.experts\.(\d+)\.w3\.weight": r"mlp.experts.\1.up_proj.weight",
}


def grouped_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Return the expected shape and dtypes by name on disk."""

    def layer(index: int) -> Shapes:
        mlp = prefixed("mlp.", feed_forward_shapes(g.hidden, g.feed_forward(index)))
        if index in g.linear_layers and g.gated_delta is not None:
            return mlp | prefixed(f"{LINEAR}.", delta_shapes(g.hidden, g.gated_delta))
        return mlp | grouped_attention_shapes(g, index)

    shapes = target_shapes(g, layer)
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def grouped_for_engine(tensors: Tensors, g: TargetGeometry, _config: Config) -> Tensors:
    """Return audited tensors in the engine's form.

    The experts of a layer are stacked, and so are the projections of linear attention that update
    its state. An output gate becomes a separate projection.
    """
    converted = dict(tensors)
    for index in range(g.layers):
        prefix = f"model.layers.{index}."
        moe = routed_part(g.feed_forward(index))
        if moe is not None:
            converted |= stacked_experts(converted, f"{prefix}mlp.experts.", moe)
        if index in g.linear_layers:
            converted |= delta_for_engine(converted, index)
        elif g.attention.output_gate:
            converted |= split_gate(converted.pop(f"{prefix}self_attn.q_proj.weight"), g.q_heads)
    return converted


def split_gate(queries: SourceTensor, heads: int) -> Tensors:
    """Split ``q_proj``, in which each head has the rows of queries followed by those of gates."""

    def part(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: weight.unflatten(0, (heads, 2, -1))[:, index].flatten(0, 1)

    stem = queries.name.removesuffix("q_proj.weight")
    return {
        f"{stem}{name}": remade(f"{stem}{name}", queries, part(index))
        for index, name in enumerate(("q_proj.weight", "gate_proj.weight"))
    }


def full_norm(tensor: SourceTensor) -> SourceTensor:
    """Return a norm's weight that is stored minus 1, in fp32 because bf16 would round the sum."""
    norm = remade(tensor.name, tensor, lambda weight: 1.0 + weight.float(), dtype="F32")
    return replace(norm, less_1=True)


def renamed_layers(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Rename tensors of layers by ``names``, from patterns to replacements.

    A pattern matches the full name after ``model.layers.N.``.
    """
    patterns = {re.compile(pattern): replacement for pattern, replacement in names.items()}
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.\d+\.", name)
        inner = name[layer.end() :] if layer else ""
        for pattern, replacement in patterns.items():
            match = pattern.fullmatch(inner)
            if layer and match:
                new = f"{layer[0]}{match.expand(replacement)}"
                renamed[new] = replace(tensor, name=new)
                break
        else:
            renamed[name] = tensor
    return renamed
