"""A table's axis of layers goes: kernels take one layer's table, and most layers share one.

Where every layer has a table of its own (SpecPV), each becomes an input, and an output, of its own.
So does what says where the pages of a layer's view stand, which has that axis only there.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import constant_array, producer

_AXES = {".page_table": 4, ".partial_table": 4, ".page_position": 3}
PARTIAL_OUTPUT = ".partial_table.out"


def unstack_page_tables(model: ir.Model) -> int:
    """``Gather(table [layers, …], i)`` becomes a graph input of the other axes.

    It keeps its name where there is one layer's, else it is ``name.i``.
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
        place = model.graph.inputs.index(table)
        table.shape = ir.Shape(list(table.shape)[1:])
        if layers > 1:
            model.graph.inputs[place : place + 1] = parts
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
    """The stacked partial tables are one output; every KvBlockSelect's own takes its place."""
    stacked = [o for o in graph.outputs if (o.name or "").endswith(PARTIAL_OUTPUT)]
    for output in stacked:
        chosen = [node.outputs[0] for node in graph if node.op_type == "KvBlockSelect"]
        place, name = graph.outputs.index(output), str(output.name).removesuffix(".out")
        output.name = f"{name}.stacked"
        for i, value in enumerate(chosen):
            value.name = f"{name}.{i}.out" if len(chosen) > 1 else f"{name}.out"
        graph.outputs[place : place + 1] = chosen
