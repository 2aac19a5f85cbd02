"""The tensors of Llama, Qwen2, Qwen3, Qwen3-MoE and MiMo on disk."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES
from specbuild.builder.families.parts.experts import expert_shapes
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    grouped_attention_shapes,
    prefixed,
    swiglu_shapes,
    target_shapes,
)
from specbuild.runtime.engine_dir.geometry import (
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    TargetGeometry,
)


def llama_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Name → shape and dtypes."""

    def layer(index: int) -> Shapes:
        mlp = _feed_forward(g.hidden, g.feed_forward(index))
        return grouped_attention_shapes(g) | prefixed("mlp.", mlp)

    shapes = target_shapes(g, layer)
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def _feed_forward(hidden: int, feed_forward: FeedForward) -> Shapes:
    if isinstance(feed_forward, DenseFeedForward):
        return swiglu_shapes(hidden, feed_forward.inner, bias=feed_forward.bias)
    assert isinstance(feed_forward, MoeFeedForward)
    router: Shapes = {"gate.weight": (feed_forward.experts, hidden)}
    return router | expert_shapes(hidden, feed_forward)
