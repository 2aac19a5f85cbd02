"""Puts a fused graph into a program: its nodes become op calls at the sizes of a bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx_ir as ir

from specbuild.builder.backends.cuda.step.ir import (
    ProgramIr,
    Storage,
    Tensor,
    tensor_bytes,
)
from specbuild.builder.graph.passes.weights import ONNX_DTYPES, Recipe, recipe_of
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.opspec import DOMAIN, TensorSpec
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP

HEAD = "RmsHead"
_POOL_OUTPUTS = ("k_pool.out", "v_pool.out", "c_pool.out", "state_pool.out")
# The attribute of ops whose rows a program either commits or leaves to the next launch.
_STORES = "stores"
_CHOSEN = ("full.partial_table", f"{INDEXER_GROUP}.partial_table")
_VIOLATIONS = f"{INDEXER_GROUP}.violations"
# What only sparse attention reads: elsewhere it and what makes it are left out.
_LISTS = "selected"
# What only programs with views give; elsewhere slots are positions.
_POSITIONS = "page_position"
_TORCH_NAMES = {dtype: str(torch).removeprefix("torch.") for torch, dtype in ONNX_DTYPES.items()}


class WeightTensors:
    """The weights of all programs of an engine: a tensor is stored once, under its name."""

    def __init__(self) -> None:
        self.recipes: dict[str, Recipe] = {}
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, recipe: Recipe) -> Tensor:
        """The tensor of this name; AssertionError where two graphs mean different ones by it."""
        if not self.recipes.setdefault(name, recipe).describes(recipe):
            raise AssertionError(f"two graphs mean different tensors by {name}")
        if name not in self._tensors:
            info = TensorInfo(recipe.shape, str(recipe.dtype).removeprefix("torch."))
            self._tensors[name] = Tensor(
                Storage(name, "weights", tensor_bytes(info.shape, info.dtype)), 0, info
            )
        return self._tensors[name]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in the order of first use."""
        return tuple(self._tensors.values())


@dataclass(frozen=True)
class FusedGraph:
    """A role's graph after the CUDA passes: nothing but ``specbuild::`` nodes.

    The head (``RmsHead``) is apart: what follows the last layer is the program's choice.
    """

    role: str
    model: ir.Model

    @cached_property
    def _nodes(self) -> tuple[ir.Node, ...]:
        nodes = tuple(self.model.graph)
        foreign = sorted({node.op_type for node in nodes if node.domain != DOMAIN})
        if foreign:
            raise AssertionError(f"{self.role}: the CUDA passes left {foreign}")
        return nodes

    @property
    def head(self) -> ir.Node | None:
        """The node that makes the logits."""
        return next((node for node in self._nodes if node.op_type == HEAD), None)

    def body(self, wanted: Sequence[ir.Value], *, sparse: bool) -> list[ir.Node]:
        """The nodes that ``wanted`` values need, in order; ``sparse``: by lists of slots."""
        needed = {id(value) for value in wanted}
        kept = []
        for node in reversed(self._nodes):
            if any(id(output) in needed for output in node.outputs):
                read = _read(node, sparse=sparse).values()
                needed |= {id(value) for value in read if value is not None}
                kept.append(node)
        return kept[::-1]

    def output(self, name: str) -> ir.Value | None:
        """A graph output by name."""
        return next((value for value in self.model.graph.outputs if value.name == name), None)

    @property
    def pools(self) -> list[ir.Value]:
        """The graph outputs that are written pools of keys and values, latents or states."""
        return [v for v in self.model.graph.outputs if v.name and v.name.endswith(_POOL_OUTPUTS)]

    @property
    def chosen(self) -> list[ir.Value]:
        """The graph outputs that are block summaries and partial tables (SpecPV)."""
        outputs = self.model.graph.outputs
        return [v for v in outputs if v.name and v.name.startswith(_CHOSEN)]

    @property
    def violations(self) -> list[ir.Value]:
        """The graph outputs that count broken lists, one a layer (DSA)."""
        outputs = self.model.graph.outputs
        return [v for v in outputs if v.name and v.name.startswith(_VIOLATIONS)]


@dataclass
class Placement:
    """A fused graph on its way into a program: values so far, by identity.

    ``sparse``: attention reads lists of slots where the graph has them (DSA). ``screens``: the head
    has a screened form. ``stores``: recurrent states take the rows in; else the next launch does
    so.
    """

    graph: FusedGraph
    program: ProgramIr
    weights: WeightTensors
    ports: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    sparse: bool = False
    prefilter_head: bool = False
    stores: bool = False

    def __post_init__(self) -> None:
        self._values: dict[int, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def put(self, value: ir.Value, place: Tensor) -> None:
        """Where an output of a call will lie."""
        self._places[id(value)] = place

    def place(self, wanted: Sequence[ir.Value]) -> None:
        """Calls what ``wanted`` needs, beside what is there already."""
        for node in self.graph.body(wanted, sparse=self.sparse):
            if not all(id(output) in self._values for output in node.outputs):
                self._call(node)

    def value(self, value: ir.Value | None) -> Tensor | None:
        """Where a value of the graph is: a weight, a port, or the output of a call."""
        if value is None:
            return None
        if id(value) in self._values:
            return self._values[id(value)]
        recipe = recipe_of(value)
        assert value.name is not None
        if recipe is not None:
            return self.weights.tensor(value.name, recipe)
        if value.name not in self.ports:
            raise AssertionError(f"{self.graph.role}: nothing gives {value.name}")
        return self.ports[value.name]

    def arguments(self, node: ir.Node) -> dict[str, Tensor | None]:
        """The inputs of a node, by declared name."""
        specs = {spec.name: spec for spec in op_named(node.op_type).inputs}
        read = _read(node, sparse=self.sparse)
        positions = read.get(_POSITIONS)
        if positions is not None and positions.name not in self.ports:
            read[_POSITIONS] = None
        return {name: _joined(self.value(value), specs[name]) for name, value in read.items()}

    def _call(self, node: ir.Node) -> None:
        op = op_named(node.op_type)
        aliased = {output for output, _ in op.aliases}
        outputs = {
            spec.name: self._places.get(id(value))
            or self.program.scratch(spec.name, self.info(value))
            for spec, value in zip(op.outputs, node.outputs, strict=True)
            if spec.name not in aliased
        }
        attributes = attributes_of(node)
        if _STORES in attributes:
            attributes[_STORES] = int(self.stores)
        made = self.program.call(node.op_type, self.arguments(node), attributes, outputs=outputs)
        for spec, value in zip(op.outputs, node.outputs, strict=True):
            self._values[id(value)] = made[spec.name]

    def info(self, value: ir.Value) -> TensorInfo:
        """Shape and type of a value at the program's sizes."""
        assert value.shape is not None and value.dtype is not None, value.name
        shape = tuple(
            size if isinstance(size, int) else self.sizes[str(size.value)] for size in value.shape
        )
        return TensorInfo(shape, _TORCH_NAMES[value.dtype])


def _read(node: ir.Node, *, sparse: bool) -> dict[str, ir.Value | None]:
    """What a call of a node reads, by declared name."""
    names = (spec.name for spec in op_named(node.op_type).inputs)
    named = dict(zip(names, node.inputs, strict=False))
    checks = node.op_type == "DsaCheck"
    return {n: value for n, value in named.items() if sparse or checks or n != _LISTS}


def _joined(tensor: Tensor | None, spec: TensorSpec) -> Tensor | None:
    """Rows are contiguous: an op that names fewer axes sees the trailing ones as one."""
    if tensor is None or spec.rank_free or len(tensor.shape) <= len(spec.axes):
        return tensor
    kept = len(spec.axes) - 1
    return tensor.view(*tensor.shape[:kept], math.prod(tensor.shape[kept:]))


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes as plain values."""
    return {name: attribute.value for name, attribute in node.attributes.items()}
