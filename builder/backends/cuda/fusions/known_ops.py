"""The last pass, which checks that only fused ops are left."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.runtime.errors import SpecbuildError

FUSED_OPS = frozenset(
    (
        "AbsorbQuery",
        "Capture",
        "ClusterLogits",
        "DsaCheck",
        "DsaIndexer",
        "DraftInput",
        "Embed",
        "KvBlockSelect",
        "KvBlockSummary",
        "LazyGatedDelta",
        "Linear",
        "LinearPartial",
        "MlaAttention",
        "PagedTreeAttention",
        "RankMoe",
        "RankSum",
        "RmsHead",
        "RmsIndexer",
        "RmsLowRank",
        "RmsMoe",
        "RmsQkvRope",
        "RmsQueryLatent",
        "RmsSwiglu",
        "SigmoidGate",
        "WeighHeads",
    )
)
_MAX_LISTED = 3


def only_known_ops(model: ir.Model) -> int:
    """Raise SpecbuildError for the nodes that no fusion replaced."""
    remaining = [
        node for node in model.graph if node.domain != DOMAIN or node.op_type not in FUSED_OPS
    ]
    if remaining:
        more = f" and {len(remaining) - _MAX_LISTED} more" if len(remaining) > _MAX_LISTED else ""
        listed = ", ".join(map(_description, remaining[:_MAX_LISTED]))
        raise SpecbuildError(
            f"no CUDA kernel computes {listed}{more}: this part of the model is not supported; "
            "build with --backend cpu"
        )
    model.graph.opset_imports.pop("", None)
    return 0


def _description(node: ir.Node) -> str:
    inputs, outputs = (
        ", ".join(str(value.name) for value in values if value is not None)
        for values in (node.inputs, node.outputs)
    )
    return f"{node.op_type} ({inputs} → {outputs})"
