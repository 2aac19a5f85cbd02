"""Removes the layer axis of page tables: kernels read the table of one layer.

If every layer has its own table (SpecPV), each becomes a separate input and output. Tables of page
positions, which have the layer axis only then, are treated alike.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import constant_array, producer

_AXES = {".page_table": 4, ".partial_table": 4, ".page_position": 3}
PARTIAL_OUTPUT = ".partial_table.out"


def unstack_page_tables(model: ir.Model) -> int:
    """Replace ``Gather(table [layers, …], i)`` by a graph input without the layer axis.

    It keeps its name if there is one layer, else it is ``name.i``. Returns the number of tables.
    """
    changed = 0
    _unstack_partial_output(model.graph)
    for table in list(model.graph.inputs):
        axes = next((n for end, n in _AXES.items() if (table.name or "").endswith(end)), None)
        assert table.shape is not None
        if axes is None or len(table.shape) != axes:
            continue
        layers = table.shape[0]
        assert isinstance(layers, int)
        parts = [_part(table, i, layers) for i in range(layers)]
        for gather in list(table.consumers()):
            gather.outputs[0].replace_all_uses_with(parts[_index(gather)])
        position = model.graph.inputs.index(table)
        table.shape = ir.Shape(list(table.shape)[1:])
        if layers > 1:
            model.graph.inputs[position : position + 1] = parts
        changed += 1
    return changed


def _part(table: ir.Value, index: int, layers: int) -> ir.Value:
    if layers == 1:
        return table
    assert table.shape is not None
    shape = ir.Shape(list(table.shape)[1:])
    return ir.Value(name=f"{table.name}.{index}", shape=shape, type=table.type)


def _index(gather: ir.Node) -> int:
    index = constant_array(gather.inputs[1]) if producer(gather.outputs[0], "Gather") else None
    if index is None or index.ndim:
        raise AssertionError(f"{gather.op_type} reads {gather.inputs[0].name}")  # type: ignore[union-attr]
    return int(index)


def _unstack_partial_output(graph: ir.Graph) -> None:
    """Replace the stacked partial tables by the outputs of each KvBlockSelect."""
    stacked = [o for o in graph.outputs if (o.name or "").endswith(PARTIAL_OUTPUT)]
    for output in stacked:
        tables = [node.outputs[0] for node in graph if node.op_type == "KvBlockSelect"]
        position, name = graph.outputs.index(output), str(output.name).removesuffix(".out")
        output.name = f"{name}.stacked"
        for i, value in enumerate(tables):
            value.name = f"{name}.{i}.out" if len(tables) > 1 else f"{name}.out"
        graph.outputs[position : position + 1] = tables
