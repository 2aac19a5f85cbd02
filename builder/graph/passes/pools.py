"""The order of a pool's axes: that of the portable graphs, or what the ops' bodies want."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.plugins_cuda.registry import op_named


def reorder_pools(model: ir.Model) -> int:
    """Pools take the axis order that the bodies want, from graph input to graph output."""
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
