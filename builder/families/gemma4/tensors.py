"""The tensors of Gemma 4's text model: in checkpoints, and in the engine's layout."""

from __future__ import annotations

import re

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, Tensors, remade
from specbuild.builder.families.gemma4.model import APART_NORMS
from specbuild.builder.families.parts.experts import expert_shapes, split_experts, stacked_experts
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    grouped_attention_shapes,
    prefixed,
    swiglu_shapes,
    target_shapes,
)
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    routed_part,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry

_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.weight")


def gemma4_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Return the shape and dtypes of every tensor of the checkpoint, by name."""
    shapes = target_shapes(g, lambda number: _layer(g, number))
    if g.layer_inputs is not None:
        width = g.layer_inputs.width
        shapes |= {
            "model.embed_tokens_per_layer.weight": (g.layer_inputs.vocab, g.layers * width),
            "model.per_layer_model_projection.weight": (g.layers * width, g.hidden),
            "model.per_layer_projection_norm.weight": (width,),
        }
    return {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}


def _layer(g: TargetGeometry, number: int) -> Shapes:
    feed_forward, hidden = g.feed_forward(number), g.hidden
    shapes = grouped_attention_shapes(g, number)
    if isinstance(feed_forward, BothFeedForward):
        moe = feed_forward.moe
        shapes |= {f"{name}.weight": (hidden,) for name in APART_NORMS}
        shapes |= {
            "router.proj.weight": (moe.experts, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (moe.experts,),
        }
        shapes |= expert_shapes(hidden, moe)
        feed_forward = feed_forward.dense
    assert isinstance(feed_forward, DenseFeedForward)
    shapes |= prefixed("mlp.", swiglu_shapes(hidden, feed_forward.inner))
    if g.layer_inputs is not None:
        width = g.layer_inputs.width
        shapes |= {
            "per_layer_input_gate.weight": (width, hidden),
            "per_layer_projection.weight": (hidden, width),
            "post_per_layer_input_norm.weight": (hidden,),
        }
    if g.layer_scale:
        shapes["layer_scalar"] = (1,)
    return shapes


def canonical(
    tensors: Tensors, g: TargetGeometry, _config: Config
) -> tuple[Tensors, tuple[str, ...]]:
    """Return one tensor for each expert, without keys and values of layers that share a cache."""
    canonical_tensors = dict(tensors)
    for number in range(g.layers):
        moe = routed_part(g.feed_forward(number))
        if moe is not None:
            split_experts(canonical_tensors, f"model.layers.{number}.experts.", moe)
    unused = [name for name in canonical_tensors if _reads_other_cache(name, g)]
    for name in unused:
        del canonical_tensors[name]
    if not unused:
        return canonical_tensors, ()
    count = len(unused)
    return canonical_tensors, (
        f"target: {count} tensors of keys and values are ignored, because the last "
        f"{g.shared_caches} layers read the caches of other layers",
    )


def _reads_other_cache(name: str, g: TargetGeometry) -> bool:
    match = _KEYS_AND_VALUES.fullmatch(name)
    return match is not None and g.layers > int(match[1]) not in g.caching_layers


def for_engine(tensors: Tensors, g: TargetGeometry, _config: Config) -> Tensors:
    """Stack a layer's experts, and multiply a router's scale by ``H^-½``."""
    converted, factor = dict(tensors), g.hidden**-0.5
    for number in range(g.layers):
        moe, prefix = routed_part(g.feed_forward(number)), f"model.layers.{number}."
        if moe is not None:
            converted |= stacked_experts(converted, f"{prefix}experts.", moe)
            scale = converted[f"{prefix}router.scale"]
            converted[scale.name] = remade(
                scale.name, scale, lambda weight: weight.float() * factor, dtype="F32"
            )
    return converted
