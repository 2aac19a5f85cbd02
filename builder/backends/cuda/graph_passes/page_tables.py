"""A page table's axis of layers goes where it has one entry: every layer has the same view."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.passes.rewriting import constant_array, producer

_SUFFIX = ".page_table"


def unstack_page_tables(model: ir.Model) -> int:
    """``Gather(page_table [1, B, G, P], 0)`` becomes the graph input, now [B, G, P]."""
    changed = 0
    for table in model.graph.inputs:
        if not (table.name or "").endswith(_SUFFIX):
            continue
        assert table.shape is not None
        if table.shape[0] != 1:
            raise AssertionError(f"{table.name}: {table.shape[0]} views where kernels take one")
        for gather in list(table.consumers()):
            assert _takes_the_first(gather), f"{gather.op_type} reads {table.name}"
            gather.outputs[0].replace_all_uses_with(table)
        table.shape = ir.Shape(list(table.shape)[1:])
        changed += 1
    return changed


def _takes_the_first(gather: ir.Node) -> bool:
    index = constant_array(gather.inputs[1]) if producer(gather.outputs[0], "Gather") else None
    return index is not None and index.ndim == 0 and index == 0
