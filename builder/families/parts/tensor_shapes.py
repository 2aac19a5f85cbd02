"""Names and shapes of the tensors that families share, as Hugging Face checkpoints have them."""

from __future__ import annotations

from collections.abc import Callable

from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.parts.target import BLOCK_NORMS
from specbuild.runtime.engine_dir.geometry import TargetGeometry

Shapes = dict[str, tuple[int, ...]]


def target_shapes(g: TargetGeometry, layer: Callable[[int], Shapes]) -> Shapes:
    """Embedding, head, norms, and what ``layer`` gives of each layer, by names within it."""
    shapes: Shapes = {
        EMBEDDING: (g.vocab, g.hidden),
        HEAD: (g.vocab, g.hidden),
        "model.norm.weight": (g.hidden,),
    }
    names = [name for name in BLOCK_NORMS[g.norm_places] if name is not None]
    for index in range(g.layers):
        every: Shapes = {f"{name}.weight": (g.hidden,) for name in names}
        shapes |= prefixed(f"model.layers.{index}.", every | layer(index))
    return shapes


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    """The same shapes under longer names."""
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def grouped_attention_shapes(g: TargetGeometry) -> Shapes:
    """Those of ``GroupedAttention`` in a checkpoint, by names within a layer."""
    rows = {"q_proj": g.q_heads, "k_proj": g.kv_heads, "v_proj": g.kv_heads}
    shapes: Shapes = {}
    for name, heads in rows.items():
        shapes[f"{name}.weight"] = (heads * g.head_dim, g.hidden)
        if g.attention.qkv_bias:
            shapes[f"{name}.bias"] = (heads * g.head_dim,)
    if g.attention.output_gate:
        # Behind the queries of each head stand the rows of its gate.
        shapes["q_proj.weight"] = (2 * g.q_heads * g.head_dim, g.hidden)
    shapes["o_proj.weight"] = (g.hidden, g.q_heads * g.head_dim)
    if g.attention.output_bias:
        shapes["o_proj.bias"] = (g.hidden,)
    if g.attention.qk_norm == "head":
        shapes |= dict.fromkeys(("q_norm.weight", "k_norm.weight"), (g.head_dim,))
    if g.attention.qk_norm == "all_heads":
        shapes["q_norm.weight"] = (g.q_heads * g.head_dim,)
        shapes["k_norm.weight"] = (g.kv_heads * g.head_dim,)
    if g.attention.sinks:
        shapes["sinks"] = (g.q_heads,)
    return prefixed("self_attn.", shapes)


def swiglu_shapes(hidden: int, inner: int, *, bias: bool = False) -> Shapes:
    """Those of ``SwigluMlp``, by names within it."""
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: Shapes = {f"{name}.weight": size for name, size in sizes.items()}
    if bias:
        shapes |= {f"{name}.bias": (size[0],) for name, size in sizes.items()}
    return shapes
