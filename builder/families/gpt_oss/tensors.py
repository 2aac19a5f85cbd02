"""The tensors that a GPT-OSS of a given geometry consists of."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES
from specbuild.runtime.engine_dir.manifest import TargetGeometry

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
        "mlp.router.weight": (g.experts, g.hidden),
        "mlp.router.bias": (g.experts,),
        "mlp.experts.gate_up_proj_bias": (g.experts, 2 * g.expert_inner),
        "mlp.experts.down_proj_bias": (g.experts, g.hidden),
    }
    if g.expert_format == "bf16":
        layer["mlp.experts.gate_up_proj"] = (g.experts, g.hidden, 2 * g.expert_inner)
        layer["mlp.experts.down_proj"] = (g.experts, g.expert_inner, g.hidden)
    return layer


def _packed_experts(g: TargetGeometry) -> dict[str, tuple[int, ...]]:
    if g.expert_format == "bf16":
        return {}
    gate_up = (g.experts, 2 * g.expert_inner, g.hidden // 32)
    down = (g.experts, g.hidden, g.expert_inner // 32)
    return {
        "mlp.experts.gate_up_proj_blocks": (*gate_up, 16),
        "mlp.experts.gate_up_proj_scales": gate_up,
        "mlp.experts.down_proj_blocks": (*down, 16),
        "mlp.experts.down_proj_scales": down,
    }
