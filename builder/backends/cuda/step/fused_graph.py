"""Converts a fused graph to op calls of a program at the sizes of a bucket."""

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

# The ops that compute logits. ClusterLogits reads those of its clusters from an RmsHead.
_HEADS = ("RmsHead", "ClusterLogits")
_POOL_OUTPUTS = ("k_pool.out", "v_pool.out", "c_pool.out", "state_pool.out")
# The attribute of ops that either commit their rows to states, or leave them to the next launch.
_STORES = "stores"
_CHOSEN = ("full.partial_table", f"{INDEXER_GROUP}.partial_table")
_VIOLATIONS = f"{INDEXER_GROUP}.violations"
# The input that only sparse attention reads. Other passes omit it and the nodes that compute it.
_LISTS = "selected"
# The input that only programs with views have. In others, slots are positions.
_POSITIONS = "page_position"
_TORCH_NAMES = {dtype: str(torch).removeprefix("torch.") for torch, dtype in ONNX_DTYPES.items()}


class WeightTensors:
    """The weights of all programs of an engine. Each tensor is stored once under its name."""

    def __init__(self) -> None:
        self.recipes: dict[str, Recipe] = {}
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, recipe: Recipe) -> Tensor:
        """Return the tensor of this name. AssertionError for a different tensor of that name."""
        if not self.recipes.setdefault(name, recipe).describes(recipe):
            raise AssertionError(f"two graphs use the name {name} for different tensors")
        if name not in self._tensors:
            info = TensorInfo(recipe.shape, str(recipe.dtype).removeprefix("torch."))
            self._tensors[name] = Tensor(
                Storage(name, "weights", tensor_bytes(info.shape, info.dtype)), 0, info
            )
        return self._tensors[name]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor in the order of first use."""
        return tuple(self._tensors.values())


@dataclass(frozen=True)
class FusedGraph:
    """A role's graph after the CUDA passes, which has only ``specbuild::`` nodes.

    The head is separate: each program decides what follows the last layer.
    """

    role: str
    model: ir.Model

    @cached_property
    def _nodes(self) -> tuple[ir.Node, ...]:
        nodes = tuple(self.model.graph)
        foreign = sorted({node.op_type for node in nodes if node.domain != DOMAIN})
        if foreign:
            raise AssertionError(f"{self.role}: the CUDA passes did not replace {foreign}")
        return nodes

    @property
    def head(self) -> ir.Node | None:
        """The node that computes the logits."""
        return next((node for node in reversed(self._nodes) if node.op_type in _HEADS), None)

    def body(self, values: Sequence[ir.Value], *, sparse: bool) -> list[ir.Node]:
        """Return the nodes that compute ``values``, in order; ``sparse`` includes DSA's lists."""
        needed = {id(value) for value in values}
        nodes = []
        for node in reversed(self._nodes):
            if any(id(output) in needed for output in node.outputs):
                inputs = _inputs_of(node, sparse=sparse).values()
                needed |= {id(value) for value in inputs if value is not None}
                nodes.append(node)
        return nodes[::-1]

    def output(self, name: str) -> ir.Value | None:
        """Return a graph output by name."""
        return next((value for value in self.model.graph.outputs if value.name == name), None)

    @property
    def pools(self) -> list[ir.Value]:
        """The graph outputs that are pools of keys and values, latents or states."""
        return [v for v in self.model.graph.outputs if v.name and v.name.endswith(_POOL_OUTPUTS)]

    @property
    def selection_outputs(self) -> list[ir.Value]:
        """The graph outputs that are block summaries and partial tables (SpecPV)."""
        outputs = self.model.graph.outputs
        return [v for v in outputs if v.name and v.name.startswith(_CHOSEN)]

    @property
    def violations(self) -> list[ir.Value]:
        """The graph outputs that count invalid lists, one per layer (DSA)."""
        outputs = self.model.graph.outputs
        return [v for v in outputs if v.name and v.name.startswith(_VIOLATIONS)]


@dataclass
class Placement:
    """A fused graph that is being converted to calls of a program.

    With ``sparse`` attention reads lists of slots if the graph has them (DSA). With
    ``prefilter_head`` the head is also stored in int8. With ``stores`` recurrent states include the
    rows of this launch, else the next launch adds them.
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
        self._output_tensors: dict[int, Tensor] = {}

    def set_output(self, value: ir.Value, tensor: Tensor) -> None:
        """Set the tensor for a value before its call is added."""
        self._output_tensors[id(value)] = tensor

    def place(self, values: Sequence[ir.Value]) -> None:
        """Add the calls that compute ``values``, unless they exist."""
        for node in self.graph.body(values, sparse=self.sparse):
            if not all(id(output) in self._values for output in node.outputs):
                self._call(node)

    def value(self, value: ir.Value | None) -> Tensor | None:
        """Return the tensor of a graph value: a weight, a port, or the output of a call."""
        if value is None:
            return None
        if id(value) in self._values:
            return self._values[id(value)]
        recipe = recipe_of(value)
        assert value.name is not None
        if recipe is not None:
            return self.weights.tensor(value.name, recipe)
        if value.name not in self.ports:
            raise AssertionError(f"{self.graph.role}: the program has no port {value.name}")
        return self.ports[value.name]

    def arguments(self, node: ir.Node) -> dict[str, Tensor | None]:
        """Return the inputs of a node by declared name."""
        specs = {spec.name: spec for spec in op_named(node.op_type).inputs}
        inputs = _inputs_of(node, sparse=self.sparse)
        positions = inputs.get(_POSITIONS)
        if positions is not None and positions.name not in self.ports:
            inputs[_POSITIONS] = None
        return {name: _flattened(self.value(value), specs[name]) for name, value in inputs.items()}

    def _call(self, node: ir.Node) -> None:
        op = op_named(node.op_type)
        aliased = {output for output, _ in op.aliases}
        outputs = {
            spec.name: self._output_tensors.get(id(value))
            or self.program.scratch(spec.name, self.info(value))
            for spec, value in zip(op.outputs, node.outputs, strict=True)
            if spec.name not in aliased
        }
        attributes = attributes_of(node)
        if _STORES in attributes:
            attributes[_STORES] = int(self.stores)
        results = self.program.call(node.op_type, self.arguments(node), attributes, outputs=outputs)
        for spec, value in zip(op.outputs, node.outputs, strict=True):
            self._values[id(value)] = results[spec.name]

    def info(self, value: ir.Value) -> TensorInfo:
        """Return shape and dtype of a value at the program's sizes."""
        assert value.shape is not None and value.dtype is not None, value.name
        shape = tuple(
            size if isinstance(size, int) else self.sizes[str(size.value)] for size in value.shape
        )
        return TensorInfo(shape, _TORCH_NAMES[value.dtype])


def _inputs_of(node: ir.Node, *, sparse: bool) -> dict[str, ir.Value | None]:
    """Return the inputs that a call of a node reads, by declared name."""
    names = (spec.name for spec in op_named(node.op_type).inputs)
    inputs = dict(zip(names, node.inputs, strict=False))
    checks = node.op_type == "DsaCheck"
    return {n: value for n, value in inputs.items() if sparse or checks or n != _LISTS}


def _flattened(tensor: Tensor | None, spec: TensorSpec) -> Tensor | None:
    """Flatten the trailing axes of a tensor to the number of axes that the op declares."""
    if tensor is None or spec.rank_free or len(tensor.shape) <= len(spec.axes):
        return tensor
    leading = len(spec.axes) - 1
    return tensor.view(*tensor.shape[:leading], math.prod(tensor.shape[leading:]))


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return a node's attributes as Python values."""
    return {name: attribute.value for name, attribute in node.attributes.items()}
