"""The tensors of an EAGLE3 draft, in checkpoints and in the engine's form."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor
from specbuild.builder.families.parts.mla_layer import MlaLayer
from specbuild.builder.families.parts.mla_tensors import layer_for_engine, layer_shapes
from specbuild.builder.families.parts.tensor_shapes import Shapes, prefixed, swiglu_shapes
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, Swiglu
from specbuild.runtime.engine_dir.geometry import MlaGeometry, TargetGeometry

LAYER = "midlayer."
LAYER_ALIAS = "layers.0."
_DEEPER = re.compile(r"layers\.(\d+)\.")


def layer_names(layers: int) -> tuple[str, ...]:
    """Return the prefix of each layer's tensors."""
    return (LAYER, *[f"layers.{index}." for index in range(1, layers)])


def count_layers(names: Iterable[str]) -> int:
    """Return the number of consecutive layers that have tensors."""
    numbers = {match[1] for name in names if (match := _DEEPER.match(name))}
    return next(index for index in itertools.count(1) if str(index) not in numbers)


def draft_tensors(g: Eagle3Geometry, target: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Return the expected shape and dtypes of a draft's tensors by canonical name."""
    shapes: Shapes = {
        "fc.weight": (g.hidden, len(g.aux_layers) * target.hidden),
        "norm.weight": (g.hidden,),
        f"{LAYER}hidden_norm.weight": (g.hidden,),
    }
    for index, prefix in enumerate(layer_names(g.layers)):
        shapes |= prefixed(prefix, _layer(g, _width(g, index)))
        if index or g.input_width == "embedding_and_hidden":
            shapes[f"{prefix}input_layernorm.weight"] = (g.hidden,)
    if g.own_embedding:
        shapes["embed_tokens.weight"] = (target.vocab, g.hidden)
    if g.own_head:
        shapes["lm_head.weight"] = (g.vocab, g.hidden)
    if g.norm_before_fc:
        shapes["input_norm.weight"] = (len(g.aux_layers) * target.hidden,)
    if g.fc_norm:
        states = range(len(g.aux_layers))
        shapes |= {f"fc_norm.{state}.weight": (target.hidden,) for state in states}
    expected = {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
    if g.d2t_form != "identity":
        expected["d2t"] = ExpectedTensor((g.vocab,), ("I64", "I32"))
    return expected


def tensors_for_engine(
    tensors: dict[str, SourceTensor], g: Eagle3Geometry
) -> dict[str, SourceTensor]:
    """Return audited tensors in the engine's form, which differs for MLA as in a target."""
    if g.mla is None:
        return tensors
    converted = dict(tensors)
    for index, prefix in enumerate(layer_names(g.layers)):
        layer = _mla_layer(g, g.mla, _width(g, index))
        converted |= layer_for_engine(converted, prefix, layer, interleaved=g.rope.interleaved)
    return converted


def _width(g: Eagle3Geometry, layer: int) -> int:
    """Return the width of a layer's attention input."""
    both = layer == 0 and g.input_width == "embedding_and_hidden"
    return 2 * g.hidden if both else g.hidden


def _layer(g: Eagle3Geometry, width: int) -> Shapes:
    shapes: Shapes = {"post_attention_layernorm.weight": (g.hidden,)}
    if g.mla is not None:
        return shapes | layer_shapes(_mla_layer(g, g.mla, width))
    shapes |= prefixed("mlp.", swiglu_shapes(g.hidden, g.inner, bias=g.mlp_bias))
    return shapes | prefixed("self_attn.", _attention(g, width))


def _mla_layer(g: Eagle3Geometry, mla: MlaGeometry, width: int) -> MlaLayer:
    mlp = DenseFeedForward(inner=g.inner, activation=Swiglu())
    return MlaLayer(g.hidden, g.q_heads, mla, g.rms_eps, mlp, width)


def _attention(g: Eagle3Geometry, width: int) -> Shapes:
    q_rows, kv_rows = g.q_heads * g.head_dim, g.kv_heads * g.head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    shapes: Shapes = {f"{part}_proj.weight": (n, width) for part, n in rows.items()}
    shapes["o_proj.weight"] = (g.hidden, q_rows)
    if g.attention.qkv_bias:
        shapes |= {f"{part}_proj.bias": (n,) for part, n in rows.items()}
    if g.attention.output_bias:
        shapes["o_proj.bias"] = (g.hidden,)
    if g.attention.qk_norm == "head":
        shapes |= {f"{part}_norm.weight": (g.head_dim,) for part in "qk"}
    return shapes
