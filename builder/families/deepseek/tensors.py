"""The tensors of a DeepSeek on disk, and the forms in which an engine's graphs name them."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor
from specbuild.builder.families.parts.mla_layer import MlaLayer
from specbuild.builder.families.parts.mla_tensors import layer_for_engine, layer_shapes
from specbuild.builder.families.parts.tensor_shapes import target_shapes
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def layer_of(g: TargetGeometry, number: int) -> MlaLayer:
    """The block of this number."""
    assert g.mla is not None
    return MlaLayer(g.hidden, g.q_heads, g.mla, g.norm.eps, g.feed_forward(number))


def deepseek_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Name on disk → shape and dtypes."""
    shapes = target_shapes(g, lambda number: layer_shapes(layer_of(g, number)))
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def for_engine(
    tensors: dict[str, SourceTensor], g: TargetGeometry, *, interleaved: bool
) -> dict[str, SourceTensor]:
    """Audited tensors in the engine's forms, each made when it is loaded."""
    made = dict(tensors)
    for number in range(g.layers):
        prefix = f"model.layers.{number}."
        made |= layer_for_engine(made, prefix, layer_of(g, number), interleaved=interleaved)
    return made
