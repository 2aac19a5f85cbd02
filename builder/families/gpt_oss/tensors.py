"""The tensors of a GPT-OSS with a certain geometry."""

from __future__ import annotations

from specbuild.builder.checkpoint.audit import ExpectedTensor
from specbuild.builder.checkpoint.source import FLOAT_DTYPES
from specbuild.builder.families.gpt_oss.geometry import experts_of
from specbuild.builder.families.parts.tensor_shapes import (
    Shapes,
    grouped_attention_shapes,
    prefixed,
    target_shapes,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def target_tensors(g: TargetGeometry) -> dict[str, ExpectedTensor]:
    """Return shape and dtypes by canonical name, for MXFP4 (blocks, scales) or dense experts."""
    shapes = target_shapes(g, lambda _: _dense_layer(g))
    packed: Shapes = {}
    for index in range(g.layers):
        packed |= prefixed(f"model.layers.{index}.", _packed_experts(g))
    expected = {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
    expected |= {name: ExpectedTensor(shape, ("U8",)) for name, shape in packed.items()}
    return expected


def _dense_layer(g: TargetGeometry) -> Shapes:
    moe = experts_of(g)
    layer = grouped_attention_shapes(g) | {
        "mlp.router.weight": (moe.experts, g.hidden),
        "mlp.router.bias": (moe.experts,),
        "mlp.experts.gate_up_proj_bias": (moe.experts, 2 * moe.inner),
        "mlp.experts.down_proj_bias": (moe.experts, g.hidden),
    }
    if moe.storage == "bf16":
        layer["mlp.experts.gate_up_proj"] = (moe.experts, g.hidden, 2 * moe.inner)
        layer["mlp.experts.down_proj"] = (moe.experts, moe.inner, g.hidden)
    return layer


def _packed_experts(g: TargetGeometry) -> Shapes:
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
