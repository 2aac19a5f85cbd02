"""The tensors of a DeepSeek checkpoint, and their layout in an engine."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor
from specbuild.builder.families.parts.mla_layer import MlaLayer
from specbuild.builder.families.parts.mla_tensors import layer_for_engine, layer_shapes
from specbuild.builder.families.parts.tensor_shapes import target_shapes
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def layer_of(g: TargetGeometry, number: int) -> MlaLayer:
    """Return the shapes of the block with this number."""
    assert g.mla is not None
    return MlaLayer(g.hidden, g.q_heads, g.mla, g.norm.eps, g.feed_forward(number))


def deepseek_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Return the shape and dtypes of every tensor of the checkpoint, by name."""
    shapes = target_shapes(g, lambda number: layer_shapes(layer_of(g, number)))
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def for_engine(
    tensors: dict[str, SourceTensor], g: TargetGeometry, *, interleaved: bool
) -> dict[str, SourceTensor]:
    """Convert audited tensors to the engine's layout; each is converted when it is loaded."""
    converted = dict(tensors)
    for number in range(g.layers):
        prefix = f"model.layers.{number}."
        converted |= layer_for_engine(
            converted, prefix, layer_of(g, number), interleaved=interleaved
        )
    return converted
