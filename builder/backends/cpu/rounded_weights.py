"""Weights of the target with the values that they have as codes: what ``--weights-dtype`` costs.

A CPU engine holds them in fp32 all the same. It shows what a CUDA engine of such weights gives.
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

# A product on its way to one of these has a weight that CUDA engines keep in bf16: a router's, and
# that of queries of latents.
_KEPT_FOR = {"Moe", "MlaAttention"}
_ON_THE_WAY = {"Cast", "Reshape", "RotaryEmbedding", "Transpose", "Unsqueeze"}
# The experts' weights among Moe's inputs, and their scales.
_EXPERTS = ((2, 3), (5, 6))


def round_weights(model: ir.Model, *, storage: Storage) -> int:
    """Projections and head, and of MXFP4 the experts that are not yet; how many weights."""
    graph, changed = model.graph, 0
    for node in graph:
        if node.op_type == "Gemm" and not _KEPT_FOR & _ends(node):
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
    """Experts [E, in, out], whose blocks lie along their inputs."""
    return rounded(weight.transpose(1, 2).contiguous(), MXFP4).transpose(1, 2)


def _ends(node: ir.Node) -> set[str]:
    """The ops that a node's result reaches through what only lays it out or turns it."""
    found: set[str] = set()
    for user in node.outputs[0].consumers():
        found |= _ends(user) if user.op_type in _ON_THE_WAY else {user.op_type}
    return found
