"""Requests for GPT-OSS's experts at their real sizes, without tensors."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.registry import op_named


def experts_request(rows: int, experts: int = 32) -> LoweringRequest:
    """RmsMoe over ``rows`` rows of two sequences, for decoding."""

    def bf16(*shape: int) -> TensorInfo:
        return TensorInfo(shape, "bfloat16")

    tensors = {
        "x": bf16(rows, 2880), "norm": bf16(2880),
        "router_weight": bf16(experts, 2880), "router_bias": bf16(experts),
        "gate_up": TensorInfo((experts, 360, 24576), "uint8"),
        "gate_up_bias": bf16(experts, 5760),
        "down": TensorInfo((experts, 360, 12288), "uint8"), "down_bias": bf16(experts, 2880),
        "row_start": TensorInfo((3,), "int32"), "y": bf16(rows, 2880),
    }  # fmt: skip
    attributes = op_named("RmsMoe").complete({"eps": 1e-5, "top_k": 4})
    return LoweringRequest(tensors, attributes)
