"""Names and shapes of tensors that families share, as in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.parts.target import BLOCK_NORMS
from specbuild.runtime.engine_dir.geometry import TargetGeometry

Shapes = dict[str, tuple[int, ...]]


def target_shapes(g: TargetGeometry, layer: Callable[[int], Shapes]) -> Shapes:
    """Return embedding, head, norms, and the tensors of ``layer`` by names within the layer."""
    shapes: Shapes = {
        EMBEDDING: (g.vocab, g.hidden),
        HEAD: (g.vocab, g.hidden),
        "model.norm.weight": (g.hidden,),
    }
    names = [name for name in BLOCK_NORMS[g.norm_places] if name is not None]
    for index in range(g.layers):
        norms: Shapes = {f"{name}.weight": (g.hidden,) for name in names}
        shapes |= prefixed(f"model.layers.{index}.", norms | layer(index))
    return shapes


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    """Return the same shapes with prefixed names."""
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def grouped_attention_shapes(g: TargetGeometry, layer: int = 0) -> Shapes:
    """Return the shapes of a layer's ``GroupedAttention`` in a checkpoint, by names within it."""
    heads, full = g.heads_of(layer), g.layer_types[layer] == "full_attention"
    rows = {"q": g.q_heads}
    if layer in g.caching_layers:
        rows |= {"k": heads.kv_heads, "v": heads.kv_heads}
    if g.attention.keys_as_values and full:
        rows.pop("v", None)
    width, shapes = heads.head_dim, Shapes()
    for name, count in rows.items():
        shapes[f"{name}_proj.weight"] = (count * width, g.hidden)
        if g.attention.qkv_bias:
            shapes[f"{name}_proj.bias"] = (count * width,)
    if g.attention.output_gate:
        # In each head the rows of the gate follow those of the queries.
        shapes["q_proj.weight"] = (2 * g.q_heads * width, g.hidden)
    shapes["o_proj.weight"] = (g.hidden, g.q_heads * width)
    if g.attention.output_bias:
        shapes["o_proj.bias"] = (g.hidden,)
    if g.attention.qk_norm != "none":
        is_full_norm = g.attention.qk_norm == "all_heads"
        for name in [name for name in rows if name != "v"]:
            shapes[f"{name}_norm.weight"] = (rows[name] * width if is_full_norm else width,)
    if g.attention.sinks:
        shapes["sinks"] = (g.q_heads,)
    return prefixed("self_attn.", shapes)


def swiglu_shapes(hidden: int, inner: int, *, bias: bool = False) -> Shapes:
    """Return the shapes of ``SwigluMlp``, by names within it."""
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: Shapes = {f"{name}.weight": size for name, size in sizes.items()}
    if bias:
        shapes |= {f"{name}.bias": (size[0],) for name, size in sizes.items()}
    return shapes
