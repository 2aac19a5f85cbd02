"""Requests for the experts of DeepSeek and similar models at real sizes, without tensors."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.rms_moe.cases import Layer
from specbuild.plugins_cuda.rms_moe.op import OP
from specbuild.plugins_cuda.rms_moe.packing import (
    TILE_OUTPUTS,
    down_steps,
    expert_tile,
    gate_up_steps,
)


def routed_request(layer: Layer) -> LoweringRequest:
    """Return a request for RmsMoe of this layer when it decodes two sequences."""

    def bf16(*shape: int) -> TensorInfo:
        return TensorInfo(shape, "bfloat16")

    def tiles(outputs: int, steps: int) -> TensorInfo:
        dtype, values = expert_tile(steps, bf16=layer.bf16)
        return TensorInfo((layer.packed, outputs // TILE_OUTPUTS, values), dtype)

    hidden, inner = layer.hidden, layer.inner
    tensors = {
        "x": bf16(layer.rows, hidden), "norm": bf16(hidden),
        "router_weight": bf16(layer.experts, hidden), "router_bias": bf16(layer.experts),
        "gate_up": tiles(inner, gate_up_steps(hidden)),
        "gate_up_bias": bf16(layer.packed, 2 * inner),
        "down": tiles(hidden, down_steps(inner)), "down_bias": bf16(layer.packed, hidden),
        "row_start": TensorInfo((3,), "int32"), "y": bf16(layer.rows, hidden),
    }  # fmt: skip
    if layer.choice_bias:
        tensors["choice_bias"] = TensorInfo((layer.experts,), "float32")
    return LoweringRequest(tensors, OP.complete(layer.attributes()))
