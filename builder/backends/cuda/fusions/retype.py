"""The first and the last of the passes: bf16 at the ports, and nothing but fused ops between."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.fusions.fused_node import ACTIVATIONS
from specbuild.plugins_cuda.opspec import DOMAIN

FUSED_OPS = frozenset(
    (
        "Capture",
        "DsaCheck",
        "DsaIndexer",
        "DraftInput",
        "Embed",
        "KvBlockSelect",
        "KvBlockSummary",
        "Linear",
        "MlaAttention",
        "PagedTreeAttention",
        "RmsHead",
        "RmsIndexer",
        "RmsMoe",
        "RmsQkvRope",
        "RmsQueryLatent",
        "RmsSwiglu",
        "WeighHeads",
    )
)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def retype_ports(model: ir.Model) -> int:
    """Pools and hidden states of a checkpoint in another float type come and go in bf16."""
    changed = 0
    for value in model.graph.inputs:
        if value.dtype in _FLOATS:
            value.type = ir.TensorType(ACTIVATIONS)
            changed += 1
    return changed


def only_known_ops(model: ir.Model) -> int:
    """AssertionError naming the nodes that no fusion took in."""
    left = [
        f"{node.op_type} ({', '.join(str(value.name) for value in node.outputs)})"
        for node in model.graph
        if node.domain != DOMAIN or node.op_type not in FUSED_OPS
    ]
    if left:
        raise AssertionError(f"{len(left)} nodes are left of the portable graph: {left[:8]}")
    model.graph.opset_imports.pop("", None)
    return 0
