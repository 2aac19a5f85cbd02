"""Exports a target's blocks once for each kind, for any number of layers.

The exporter's time grows with the traced operators, and the layers of a model are a few kinds of
blocks. During the export of a target each block is therefore one node, which calls an ONNX
function. Every kind of block is exported alone and becomes such a function, with its weights as
inputs. Finally all calls are inlined. The graph equals that of an export of the complete module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnx_ir.passes.common import InlinePass
from onnxscript.values import Op, Opset
from torch import nn

from specbuild.builder.families.parts.graph_io import (
    GroupView,
    InputPort,
    Launch,
    Pools,
    StatePools,
    StateView,
    WrittenStates,
    layer_pools,
    layer_view,
    output_name,
)

BLOCK_DOMAIN = "specbuild.blocks"
_VERSION = 1


@torch.library.custom_op("specbuild_export::block", mutates_args=())
def block_call(
    inputs: list[torch.Tensor], name: str, written: int, row_widths: list[int]
) -> list[torch.Tensor]:
    """A call of the function with this name; its outputs are like the first ``written`` inputs.

    They are followed by values of its rows, of these widths.
    """
    del inputs, written, row_widths
    raise AssertionError(f"{name} is exported, never run")


@block_call.register_fake
def _(
    inputs: list[torch.Tensor], name: str, written: int, row_widths: list[int]
) -> list[torch.Tensor]:
    del name
    x = inputs[0]
    rows = [x.new_empty(x.shape[0], width) for width in row_widths]
    return [*[torch.empty_like(tensor) for tensor in inputs[:written]], *rows]


def block_translation(
    inputs: Sequence[Any], name: str, written: int, row_widths: Sequence[int]
) -> Any:
    """Return the node of a :func:`block_call`, for torch's exporter."""
    anything = ["tensor(bfloat16)", "tensor(float16)", "tensor(float)", "tensor(int32)"]
    parameter, option = OpSchema.FormalParameter, OpSchema.FormalParameterOption
    schema = OpSchema(
        name,
        BLOCK_DOMAIN,
        _VERSION,
        inputs=[parameter("inputs", "I", param_option=option.Variadic, is_homogeneous=False)],
        outputs=[parameter(f"written_{i}", f"O{i}") for i in range(written + len(row_widths))],
        type_constraints=[
            ("I", [*anything, "tensor(uint8)"], ""),
            *[(f"O{i}", anything, "") for i in range(written + len(row_widths))],
        ],
    )
    outputs = Op(Opset(BLOCK_DOMAIN, _VERSION), name, schema)(*inputs)
    # A block that writes no pools has one output, which the exporter also requires as a list.
    return outputs if isinstance(outputs, Sequence) else (outputs,)


@dataclass(frozen=True)
class BlockPorts:
    """The inputs of a block besides the residual stream ``x``, in the order of its arguments.

    ``tables`` are the cosines and sines of positions. Ports of a single layer have names without
    the layer. ``row_outputs`` are values of its rows, which it returns after the pools. ``writes``:
    it returns the written pools. ``layer_input`` is its part of a model's ``layer_inputs``, if
    there are any.
    """

    x: InputPort
    pools: tuple[InputPort, ...]
    view: tuple[InputPort, ...]
    launch: tuple[InputPort, ...]
    tables: tuple[InputPort, ...]
    row_outputs: tuple[InputPort, ...] = ()
    writes: bool = True
    layer_input: tuple[InputPort, ...] = ()

    @classmethod
    def of_layer(
        cls,
        hidden: int,
        pools: Sequence[InputPort],
        view: Sequence[InputPort],
        launch: tuple[InputPort, ...],
        tables: Sequence[torch.Tensor],
        *,
        row_outputs: Sequence[InputPort] = (),
    ) -> BlockPorts:
        """Return the ports of a layer with these pools and this view, for any number of pages."""

        def short(port: InputPort, *shape: int | str) -> InputPort:
            return InputPort(port.name.rpartition(".")[2], port.dtype, shape)

        cos, sin = (
            InputPort(name, table.dtype, ("positions", *table.shape[1:]))
            for name, table in zip(("cos", "sin"), tables, strict=True)
        )
        return cls(
            InputPort("x", pools[0].dtype, ("T", hidden)),
            tuple(short(port, "pages", *port.shape[1:]) for port in pools),
            tuple(short(port, *port.shape) for port in view),
            launch,
            (cos, sin),
            tuple(short(port, *port.shape) for port in row_outputs),
        )

    def sharing(self, *, writes: bool, input_width: int) -> BlockPorts:
        """Return the ports of a layer that may write no pools, with a ``layer_input`` of this
        width.
        """
        given = (InputPort("layer_input", self.x.dtype, ("T", input_width)),) if input_width else ()
        return replace(self, writes=writes, layer_input=given)

    @property
    def flat(self) -> tuple[InputPort, ...]:
        """All of them."""
        return (
            self.x,
            *self.pools,
            *self.view,
            *self.launch,
            *self.tables,
            *self.layer_input,
        )

    @property
    def written(self) -> tuple[InputPort, ...]:
        """The first outputs: the stream, and the written pools."""
        return (self.x, *(self.pools if self.writes else ()))

    def arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return values of ``flat`` as the arguments of a block."""
        rest = iter(values)
        parts = [
            [next(rest) for _ in ports]
            for ports in ((self.x,), self.pools, self.view, self.launch, self.tables)
        ]
        (x,), pools, view, launch, tables = parts
        lossy = (None, None) if self.layer_input else ()
        return (
            x,
            layer_pools(self.pools, pools),
            layer_view(self.view, view),
            Launch(*launch),
            tuple(tables),
            *lossy,
            *rest,
        )


@dataclass(frozen=True)
class BlockFunction:
    """A kind of block as an ONNX function, whose last inputs are the weights of these names.

    ``written`` is the number of its outputs that are written inputs; ``row_widths`` are those of
    the outputs after them.
    """

    function: ir.Function
    weights: tuple[str, ...]
    written: int
    row_widths: tuple[int, ...]


class BlockCall(nn.Module):
    """Replaces a block while its target is exported: one node that calls its function."""

    def __init__(self, block: nn.Module, called: BlockFunction) -> None:
        super().__init__()
        self.called = called
        for name, child in block.named_children():
            self.add_module(name, child)
        for name, weight in block.named_parameters(recurse=False):
            self.register_parameter(name, weight)

    def forward(
        self,
        x: torch.Tensor,
        pools: Pools,
        view: GroupView | StateView,
        launch: Launch,
        tables: tuple[torch.Tensor, ...],
        *beside: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        """See :class:`~specbuild.builder.families.parts.target.Block`, without SpecPV and DSA."""
        blocks, index, layer_input = beside
        assert blocks is None and index is None
        weights = [self.get_parameter(name) for name in self.called.weights]
        extra = [] if layer_input is None else [layer_input]
        given = [x, *pools, *[v for v in view if v is not None], *launch, *tables, *extra, *weights]
        widths = list(self.called.row_widths)
        new_x, *new = block_call(given, self.called.function.name, self.called.written, widths)
        kind = WrittenStates if isinstance(pools, StatePools) else type(pools)
        return new_x, kind(*new) if new else None, (), ()


def call_blocks(
    layers: nn.ModuleList,
    ports: Sequence[BlockPorts],
    exported: Callable[[nn.Module, BlockPorts], ir.Model],
) -> list[ir.Function]:
    """Replace each block by a :class:`BlockCall`, and return the functions that they call.

    ``ports[i]`` are those of layer i. ``exported`` exports a block, with outputs as in
    :func:`block_outputs`.
    """
    kinds: dict[str, BlockFunction] = {}
    for i, (block, block_ports) in enumerate(zip(layers, ports, strict=True)):
        kind = kind_of(block, block_ports)
        if kind not in kinds:
            widths = tuple(int(port.shape[1]) for port in block_ports.row_outputs)
            model = exported(block, block_ports)
            kinds[kind] = _function(model, f"Block{len(kinds)}", len(block_ports.written), widths)
        layers[i] = BlockCall(block, kinds[kind])
    return [kind.function for kind in kinds.values()]


def block_outputs(ports: BlockPorts) -> tuple[tuple[str, ...], tuple[tuple[int | str, ...], ...]]:
    """Return the names and shapes of a block's outputs: stream, pools, and values of its rows."""
    written = ports.written
    names = [output_name(port.name) for port in written]
    rows = ports.row_outputs
    return (
        (*names, *[port.name for port in rows]),
        tuple(port.shape for port in (*written, *rows)),
    )


def kind_of(block: nn.Module, ports: BlockPorts) -> str:
    """Return a key that is equal for blocks with the same graph: the contents of their modules."""
    return repr((_structure(block), ports))


def inline_blocks(model: ir.Model, functions: Sequence[ir.Function]) -> None:
    """Inline the functions' nodes at their calls."""
    for function in functions:
        model.functions[function.identifier()] = function
    InlinePass()(model)
    model.graph.opset_imports.pop(BLOCK_DOMAIN, None)


def _function(
    model: ir.Model, name: str, written: int, row_widths: tuple[int, ...]
) -> BlockFunction:
    graph = model.graph
    weights = {name: value for name, value in graph.initializers.items() if value.uses()}
    graph.initializers.clear()
    graph.inputs.extend(weights.values())
    function = ir.Function(BLOCK_DOMAIN, name, graph=graph, attributes=[])
    return BlockFunction(function, tuple(weights), written, row_widths)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's class, plain attributes, tensors and children."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }
    tensors = [
        (name, None if tensor is None else (tuple(tensor.shape), str(tensor.dtype)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    children = [(name, _structure(child)) for name, child in module.named_children()]
    return type(module).__qualname__, sorted(plain.items()), tensors, children
