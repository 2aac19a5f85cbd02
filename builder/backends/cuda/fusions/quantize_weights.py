"""Quantizes weights of dense layers, and of experts in bf16.

A quantized draft proposes other tokens without changing the output. A quantized target changes the
output. Norms, biases and the embedding are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import static
from specbuild.builder.graph.passes.weights import derive
from specbuild.plugins_cuda.linear.block_scaled import mxfp4_blocks, quantised
from specbuild.plugins_cuda.linear.storage import MXFP4, Storage
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.packing import (
    down_steps,
    gate_up_steps,
    pack_down,
    pack_gate_up,
    tile_bytes,
    unpack_down_values,
    unpack_gate_up_values,
)

# The packed weights of every op that multiplies by weights.
_WEIGHTS = {
    "Linear": ("weight",),
    "LinearPartial": ("weight",),
    "RankMoe": ("gate_up", "down"),
    "RmsHead": ("weight",),
    "RmsLowRank": ("weight",),
    "RmsQkvRope": ("weight",),
    "RmsSwiglu": ("gate_up",),
    "RmsMoe": ("gate_up", "down"),
}


def quantize_weights(model: ir.Model, *, storage: Storage) -> int:
    """Quantize the weights of all fused projections and return their number.

    Experts that are already quantized stay. Others must become MXFP4.
    """
    graph, changed = model.graph, 0
    for node in graph:
        if node.op_type not in _WEIGHTS:
            continue
        declared = [tensor.name for tensor in op_named(node.op_type).inputs]
        for name in _WEIGHTS[node.op_type]:
            index = declared.index(name)
            weight = node.inputs[index]
            assert weight is not None
            quantize: Callable[[torch.Tensor], torch.Tensor] = partial(quantised, storage=storage)
            if node.op_type in ("RmsMoe", "RankMoe"):
                if weight.dtype == ir.DataType.UINT8:
                    continue
                if storage is not MXFP4:
                    raise AssertionError(f"experts: got {storage.name}, expected MXFP4")
                quantize = (
                    _quantized_gate_up if name == "gate_up" else _quantized_down(node, declared)
                )
            quantized_weight = derive(graph, f"{weight.name}.{storage.name}", [weight], quantize)
            node.replace_input_with(index, quantized_weight)
            changed += 1
    return changed


def _quantized_gate_up(packed: torch.Tensor) -> torch.Tensor:
    """Quantize packed bf16 experts to MXFP4, one expert at a time."""
    experts, tiles, _ = packed.shape
    if packed.is_meta:
        width = unpack_gate_up_values(packed[:1]).shape[1]
        shape = (experts, tiles, tile_bytes(gate_up_steps(width)))
        return torch.empty(shape, dtype=torch.uint8, device=packed.device)
    return pack_gate_up(*_blocks(packed, unpack_gate_up_values))


def _quantized_down(moe: ir.Node, declared: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that quantizes down, whose inner width the biases of gate/up have."""
    inner = static(moe.inputs[declared.index("gate_up_bias")], 1) // 2

    def make(packed: torch.Tensor) -> torch.Tensor:
        if packed.is_meta:
            shape = (*packed.shape[:2], tile_bytes(down_steps(inner)))
            return torch.empty(shape, dtype=torch.uint8, device=packed.device)
        return pack_down(*_blocks(packed, partial(unpack_down_values, inner=inner)))

    return make


def _blocks(
    packed: torch.Tensor, unpack: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [mxfp4_blocks(unpack(one)[0].T.contiguous()) for one in packed.split(1)]
    blocks, scales = zip(*pairs, strict=True)
    return torch.stack(blocks), torch.stack(scales)
