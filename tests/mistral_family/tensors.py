"""The tensors of a Mistral."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    grouped_attention_shapes,
    prefixed,
    swiglu_shapes,
    target_shapes,
)
from specbuild.runtime.engine_dir.geometry import DenseFeedForward, TargetGeometry


def mistral_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Name → shape and dtypes."""

    def layer(index: int) -> Shapes:
        mlp = g.feed_forward(index)
        assert isinstance(mlp, DenseFeedForward)
        return grouped_attention_shapes(g) | prefixed("mlp.", swiglu_shapes(g.hidden, mlp.inner))

    shapes = target_shapes(g, layer)
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
