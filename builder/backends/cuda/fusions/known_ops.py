"""The last of the passes: nothing but fused ops is left."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.runtime.errors import SpecbuildError

FUSED_OPS = frozenset(
    (
        "AbsorbQuery",
        "Capture",
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
# What a refusal shows of the nodes that are left.
_SHOWN = 3


def only_known_ops(model: ir.Model) -> int:
    """SpecbuildError naming the nodes that no fusion took in, with what they read and give."""
    left = [node for node in model.graph if node.domain != DOMAIN or node.op_type not in FUSED_OPS]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise SpecbuildError(
            f"no CUDA kernel computes {', '.join(map(_shown, left[:_SHOWN]))}{more}: the model has "
            "a form that they do not know; build with --backend cpu"
        )
    model.graph.opset_imports.pop("", None)
    return 0


def _shown(node: ir.Node) -> str:
    read, given = (
        ", ".join(str(value.name) for value in values if value is not None)
        for values in (node.inputs, node.outputs)
    )
    return f"{node.op_type} ({read} → {given})"
