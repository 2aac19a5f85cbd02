"""Rounds weights of the target to simulate the accuracy of ``--weights-dtype``.

A CPU engine stores the rounded values in fp32. They equal those of a CUDA engine with such weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
import torch

from specbuild.builder.graph.passes.weights import derive, recipe_of
from specbuild.plugins_cuda.linear.block_scaled import rounded
from specbuild.plugins_cuda.linear.storage import MXFP4, Storage

Make = Callable[[torch.Tensor], torch.Tensor]

# CUDA engines keep a weight in bf16 if its product reaches one of these ops. These are the weights
# of routers, and of the queries of latents.
_BF16_USERS = {"Moe", "MlaAttention"}
_LAYOUT_OPS = {"Cast", "Reshape", "RotaryEmbedding", "Transpose", "Unsqueeze"}
# The indices of the experts' weights and of their scales among the inputs of Moe.
_EXPERTS = ((2, 3), (5, 6))


def round_weights(model: ir.Model, *, storage: Storage) -> int:
    """Round projections and head, and for MXFP4 also unquantized experts; return the number."""
    graph, changed = model.graph, 0
    for node in graph:
        if node.op_type == "Gemm" and not _BF16_USERS & _ends(node):
            changed += _round(graph, node, 1, partial(rounded, storage=storage), storage)
        elif node.op_type == "Moe" and storage is MXFP4:
            for weight, scales in _EXPERTS:
                if scales >= len(node.inputs) or node.inputs[scales] is None:
                    changed += _round(graph, node, weight, _rounded_experts, storage)
    return changed


def _round(graph: ir.Graph, node: ir.Node, index: int, make: Make, storage: Storage) -> int:
    weight = node.inputs[index]
    if weight is None or recipe_of(weight) is None:
        return 0
    node.replace_input_with(index, derive(graph, f"{weight.name}.{storage.name}", [weight], make))
    return 1


def _rounded_experts(weight: torch.Tensor) -> torch.Tensor:
    """Round experts [E, in, out] in blocks along their inputs."""
    return rounded(weight.transpose(1, 2).contiguous(), MXFP4).transpose(1, 2)


def _ends(node: ir.Node) -> set[str]:
    """Return the ops that read a node's result, directly or through reshapes and rotations."""
    users: set[str] = set()
    for user in node.outputs[0].consumers():
        users |= _ends(user) if user.op_type in _LAYOUT_OPS else {user.op_type}
    return users
