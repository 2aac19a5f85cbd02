"""Programs take a draft's mask rows through ``draft_fuse`` as all others: no state of their own."""

from __future__ import annotations

import onnx_ir as ir

MASK_STATE = "mask_hidden"


def drop_mask_state(model: ir.Model) -> int:
    """The output that hands on the mask rows' state goes; what made it is removed as unused."""
    outputs = model.graph.outputs
    found = [value for value in outputs if value.name == MASK_STATE]
    for value in found:
        outputs.remove(value)
    return len(found)
