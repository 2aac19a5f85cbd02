"""The tensors that a GPT-OSS of a given geometry consists of."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES
from specbuild.builder.families.gpt_oss.geometry import experts_of
from specbuild.runtime.engine_dir.geometry import TargetGeometry

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def target_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Canonical name → shape and dtypes, for MXFP4 (blocks, scales) or dense experts."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (g.vocab, g.hidden),
        HEAD: (g.vocab, g.hidden),
        "model.norm.weight": (g.hidden,),
    }
    packed: dict[str, tuple[int, ...]] = {}
    for index in range(g.layers):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}{name}": shape for name, shape in _dense_layer(g).items()}
        packed |= {f"{layer}{name}": shape for name, shape in _packed_experts(g).items()}
    expected = {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
    expected |= {name: ExpectedTensor(shape, ("U8",)) for name, shape in packed.items()}
    return expected


def _dense_layer(g: TargetGeometry) -> dict[str, tuple[int, ...]]:
    moe = experts_of(g)
    q_rows, kv_rows = g.q_heads * g.head_dim, g.kv_heads * g.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (g.hidden,),
        "post_attention_layernorm.weight": (g.hidden,),
        "self_attn.q_proj.weight": (q_rows, g.hidden),
        "self_attn.q_proj.bias": (q_rows,),
        "self_attn.k_proj.weight": (kv_rows, g.hidden),
        "self_attn.k_proj.bias": (kv_rows,),
        "self_attn.v_proj.weight": (kv_rows, g.hidden),
        "self_attn.v_proj.bias": (kv_rows,),
        "self_attn.o_proj.weight": (g.hidden, q_rows),
        "self_attn.o_proj.bias": (g.hidden,),
        "self_attn.sinks": (g.q_heads,),
        "mlp.router.weight": (moe.experts, g.hidden),
        "mlp.router.bias": (moe.experts,),
        "mlp.experts.gate_up_proj_bias": (moe.experts, 2 * moe.inner),
        "mlp.experts.down_proj_bias": (moe.experts, g.hidden),
    }
    if moe.storage == "bf16":
        layer["mlp.experts.gate_up_proj"] = (moe.experts, g.hidden, 2 * moe.inner)
        layer["mlp.experts.down_proj"] = (moe.experts, moe.inner, g.hidden)
    return layer


def _packed_experts(g: TargetGeometry) -> dict[str, tuple[int, ...]]:
    moe = experts_of(g)
    if moe.storage == "bf16":
        return {}
    gate_up = (moe.experts, 2 * moe.inner, g.hidden // 32)
    down = (moe.experts, g.hidden, moe.inner // 32)
    return {
        "mlp.experts.gate_up_proj_blocks": (*gate_up, 16),
        "mlp.experts.gate_up_proj_scales": gate_up,
        "mlp.experts.down_proj_blocks": (*down, 16),
        "mlp.experts.down_proj_scales": down,
    }
