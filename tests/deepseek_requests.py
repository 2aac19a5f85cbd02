"""Requests for the experts of DeepSeek and similar models at real sizes, without tensors."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.rms_moe.cases import Layer
from specbuild.plugins_cuda.rms_moe.expert_codes import expert_weight
from specbuild.plugins_cuda.rms_moe.op import OP
from specbuild.plugins_cuda.rms_moe.packing import TILE_OUTPUTS, down_steps, gate_up_steps


def routed_request(layer: Layer) -> LoweringRequest:
    """Return a request for RmsMoe of this layer when it decodes two sequences."""

    def bf16(*shape: int) -> TensorInfo:
        return TensorInfo(shape, "bfloat16")

    hidden, inner = layer.hidden, layer.inner
    gate_up, down = layer.storages
    tensors = {
        "x": bf16(layer.rows, hidden), "norm": bf16(hidden),
        "router_weight": bf16(layer.experts, hidden), "router_bias": bf16(layer.experts),
        "gate_up": expert_weight(
            gate_up, layer.packed, inner // TILE_OUTPUTS, gate_up_steps(hidden)
        ),
        "gate_up_bias": bf16(layer.packed, 2 * inner),
        "down": expert_weight(down, layer.packed, hidden // TILE_OUTPUTS, down_steps(inner)),
        "down_bias": bf16(layer.packed, hidden),
        "row_start": TensorInfo((3,), "int32"), "y": bf16(layer.rows, hidden),
    }  # fmt: skip
    if layer.choice_bias:
        tensors["choice_bias"] = TensorInfo((layer.experts,), "float32")
    if layer.router_norm:
        tensors["router_norm"] = TensorInfo((hidden,), "float32")
    if layer.expert_scale:
        tensors["expert_scale"] = TensorInfo((layer.experts,), "float32")
    return LoweringRequest(tensors, OP.complete(layer.attributes()))
