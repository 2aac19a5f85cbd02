"""Exports a module on the meta device as a portable ONNX graph with ``specbuild::`` nodes.

The graph refers to weights by name; no checkpoint is read here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.values import Opset
from torch import nn

from specbuild.builder.families.parts.graph_io import InputPort
from specbuild.builder.graph.repeated_blocks import block_translation, inline_blocks
from specbuild.plugins_cuda.onnx_schema import register_schemas
from specbuild.plugins_cuda.opspec import DOMAIN, OPSET_VERSION
from specbuild.plugins_cuda.registry import all_ops
from specbuild.plugins_cuda.torch_ops import register_torch_ops

OPSET = 23
IR_VERSION = 11
_SYMBOL = re.compile(r"[su]\d+")
_DTYPES = {torch.int32: ir.DataType.INT32, torch.float32: ir.DataType.FLOAT,
           torch.bfloat16: ir.DataType.BFLOAT16, torch.float16: ir.DataType.FLOAT16}  # fmt: skip


@dataclass(frozen=True)
class GraphDeclaration:
    """The inputs and outputs of a role's graph: ports in the module's argument order."""

    role: str
    inputs: tuple[InputPort, ...]
    outputs: tuple[str, ...]
    output_shapes: tuple[tuple[int | str, ...], ...]
    stages: tuple[str, ...] = ()


class _TranslatedAsItIs(torch.export.ExportedProgram):
    """A traced module whose operators the exporter can translate.

    The exporter would otherwise trace it again to decompose unknown operators, which takes more
    time than everything else. A new unknown operator is an error that names it.
    """

    def run_decompositions(self, *_: Any, **__: Any) -> torch.export.ExportedProgram:
        """Return the program, without a second trace."""
        return self


def _simplify(traced: torch.export.ExportedProgram) -> None:
    """Decompose operators that the exporter translates badly or not at all."""
    aten = torch.ops.aten
    for node in list(traced.graph.nodes):
        if node.target is aten.to.dtype:
            source, dtype = node.args[:2]
            if source.meta["val"].dtype == dtype:
                node.replace_all_uses_with(source)
                traced.graph_signature.replace_all_uses(node.name, source.name)
                traced.graph.erase_node(node)
            else:
                node.target, node.args = aten._to_copy.default, (source,)
                node.kwargs = {"dtype": dtype}
        elif node.target in (aten.flatten.using_ints, aten.unflatten.int):
            shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
            if shape.count(-1) <= 1:
                node.target, node.args = aten.reshape.default, (node.args[0], shape)


def export_module(
    module: nn.Module,
    declaration: GraphDeclaration,
    pack: Callable[[Sequence[Any]], tuple[Any, ...]],
    functions: Sequence[ir.Function] = (),
) -> ir.Model:
    """Export ``module`` (meta device). ``pack`` arranges flat port values as its arguments.

    Outputs beyond the declared ones are stages: they keep their names in the graph but are not
    outputs of it. ``functions`` are those of blocks that the module calls.
    """
    register_schemas()
    register_torch_ops()
    sizes = _sample_sizes(declaration.inputs)
    examples = [
        torch.empty(
            [sizes[s] if isinstance(s, str) else s for s in port.shape],
            dtype=port.dtype,
            device="meta",
        )
        for port in declaration.inputs
    ]
    dims = [
        {
            axis: torch.export.Dim.DYNAMIC
            for axis, size in enumerate(port.shape)
            if isinstance(size, str)
        }
        for port in declaration.inputs
    ]
    with _quiet(), _without_collecting():
        traced = torch.export.export(
            module, pack(examples), dynamic_shapes=pack(dims), strict=False
        )
        _simplify(traced)
        traced.__class__ = _TranslatedAsItIs
        program = torch.onnx.export(
            traced,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            input_names=[port.name for port in declaration.inputs],
            custom_translation_table=_translations(),
        )
    assert program is not None
    model: ir.Model = program.model
    _name_axes(model.graph, declaration)
    inline_blocks(model, functions)
    _name_ports(model.graph, declaration)
    _take_sizes_of_ports(model.graph)
    return model


def single_op_model(
    role: str,
    op_name: str,
    ports: tuple[InputPort, ...],
    attributes: dict[str, Any],
    initializers: Sequence[ir.Value] = (),
) -> ir.Model:
    """Return the graph of a role with one op, whose inputs are ports and initializers by name.

    Optional ones at the end of the declaration may be omitted.
    """
    op = all_ops()[op_name]
    by_name = {value.name: value for value in initializers}
    inputs = [graph_value(port) for port in ports]
    by_name |= {value.name: value for value in inputs}
    given = [tensor for tensor in op.inputs if tensor.name in by_name or not tensor.optional]
    node = ir.Node(
        DOMAIN,
        op_name,
        [by_name[tensor.name] for tensor in given],
        [ir.AttrInt64(name, value) for name, value in attributes.items()],
        num_outputs=len(op.outputs),
    )
    for value, spec in zip(node.outputs, op.outputs, strict=True):
        value.name = spec.name
        dtype = ir.DataType.INT32 if spec.dtype == "int32" else ir.DataType.FLOAT
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(spec.axes)
    graph = ir.Graph(
        inputs,
        node.outputs,
        nodes=[node],
        initializers=initializers,
        opset_imports={"": OPSET, DOMAIN: OPSET_VERSION},
        name=role,
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def graph_value(port: InputPort) -> ir.Value:
    """Return a value of a graph with the port's name, type and shape."""
    return ir.Value(
        name=port.name, shape=ir.Shape(port.shape), type=ir.TensorType(_DTYPES[port.dtype])
    )


def _sample_sizes(ports: tuple[InputPort, ...]) -> dict[str, int]:
    """Return distinct sizes per dynamic axis, not 0 or 1 (torch.export specializes those)."""
    names = dict.fromkeys(s for port in ports for s in port.shape if isinstance(s, str))
    return {name: 5 + 2 * i for i, name in enumerate(names)}


def _translations() -> dict[Any, Callable[..., Any]]:
    opset = Opset(DOMAIN, OPSET_VERSION)

    def translation(name: str) -> Callable[..., Any]:
        def translate(*inputs: Any, **attributes: Any) -> Any:
            return getattr(opset, name)(*inputs, **attributes)

        return translate

    ours = {getattr(torch.ops.specbuild, name).default: translation(name) for name in all_ops()}
    return {**ours, torch.ops.specbuild_export.block.default: block_translation}


def _name_axes(graph: ir.Graph, declaration: GraphDeclaration) -> None:
    """Rename the axes of all values from torch's symbols to the names of ports."""
    names = {
        str(size.value): axis
        for value, port in zip(graph.inputs, declaration.inputs, strict=True)
        for size, axis in zip(value.shape or (), port.shape, strict=True)
        if isinstance(size, ir.SymbolicDim) and isinstance(axis, str)
    }

    def named(size: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(size, int):
            return size
        return size.value and _SYMBOL.sub(lambda m: names.get(m[0], m[0]), size.value)

    for node in graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([named(size) for size in value.shape])


def _name_ports(graph: ir.Graph, declaration: GraphDeclaration) -> None:
    for value, port in zip(graph.inputs, declaration.inputs, strict=True):
        value.name, value.shape = port.name, ir.Shape(port.shape)
    names = (*declaration.outputs, *declaration.stages)
    values = list(graph.outputs)
    if len(values) != len(names):
        raise AssertionError(f"{declaration.role}: {len(values)} outputs, declared {names}")
    for value, name in zip(values, names, strict=True):
        # A stage that is an aux hidden state, or an output that is one too, keeps its first name.
        if value.name not in names:
            value.name = name
    for _ in declaration.stages:
        graph.outputs.pop()
    for value, shape in zip(graph.outputs, declaration.output_shapes, strict=True):
        value.shape = ir.Shape(shape)


def _take_sizes_of_ports(graph: ir.Graph) -> None:
    """Replace computed sizes by those of a port, so that layers share their computations."""
    ports: dict[str, tuple[ir.Value, int]] = {}
    for port in graph.inputs:
        for axis, size in enumerate(port.shape or ()):
            ports.setdefault(str(size), (port, axis))
    for node in graph:
        source = node.inputs[0] if node.op_type == "Shape" else None
        if source is None or source.shape is None or "end" not in node.attributes:
            continue
        start, end = (node.attributes[name].as_int() for name in ("start", "end"))
        if end - start == 1 and str(source.shape[start]) in ports:
            port, axis = ports[str(source.shape[start])]
            node.replace_input_with(0, port)
            node.attributes["start"] = ir.AttrInt64("start", axis)
            node.attributes["end"] = ir.AttrInt64("end", axis + 1)


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppress the exporter's progress, and its warnings about packages that are never used."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _without_collecting() -> Any:
    """Pause garbage collection: scans for the exporter's cycles took a quarter of its time.

    The next collection afterwards removes them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
