"""Changes the axis order of pools from that of portable graphs to that of the ops' bodies."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.plugins_cuda.registry import op_named


def reorder_pools(model: ir.Model) -> int:
    """Change the axis order of all pools, from graph input to graph output."""
    changed = 0
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        op = op_named(node.op_type)
        ports = zip(node.inputs, op.inputs, strict=False)
        results = zip(node.outputs, op.outputs, strict=True)
        for value, spec in (*ports, *results):
            permutation = spec.body_permutation
            if value is None or permutation is None or value.meta.get("pool_reordered"):
                continue
            assert value.shape is not None
            value.shape = ir.Shape([value.shape[axis] for axis in permutation])
            value.meta["pool_reordered"] = True
            changed += 1
    return changed
