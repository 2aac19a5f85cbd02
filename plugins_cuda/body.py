"""Builds an op's standard-ONNX body: a recorder of nodes that reads like the maths.

A body is ``body(b, inputs, attributes) -> outputs``: ``b`` records nodes, ``inputs`` are the
op's inputs in declared order (None for an absent one), ``attributes`` are complete. It may use
the rank and any static size of an input, nothing else. Its result stands in a graph of opset 23
in which everything of type T is fp32; equal sub-expressions of several nodes (the mask that all
layers share) are merged afterwards, so a body just writes them down.

A weighted body also takes ``derive(name, parents, make) -> ir.Value``: a weight that
``make(*parents)`` computes in plain torch when the engine is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

STANDARD_OPSET = 23
CONTRIB_DOMAIN = "com.microsoft"


DeriveWeight = Callable[[str, Sequence[ir.Value | None], Callable[..., Any]], ir.Value]


class Record(Protocol):
    """Records one node of some op type: inputs by position, attributes by keyword."""

    @overload
    def __call__(
        self, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]: ...

    @overload
    def __call__(
        self, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value: ...


class BodyBuilder:
    """Records ONNX nodes; ``b.MatMul(x, y)`` appends a node and returns its first output."""

    def __init__(self, scope: str = "") -> None:
        self._tape = Tape()
        self._scope = scope
        self._branches = 0

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """The nodes recorded so far, in order."""
        return self._tape.nodes

    def __getattr__(self, op_type: str) -> Record:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def record(*inputs: ir.Value | None, outputs: int = 1, domain: str = "", **kw: Any) -> Any:
            if outputs == 1:
                return self._tape.op(op_type, inputs, kw, domain=domain)
            return self._tape.op_multi_out(op_type, inputs, kw, num_outputs=outputs, domain=domain)

        return record

    def topk(self, x: ir.Value, k: ir.Value, *, largest: bool = True) -> Sequence[ir.Value]:
        """Values and int64 indices of the ``k`` best along the last axis, best first.

        ``k`` is int64 [1]. Ties go to the lower index.
        """
        return self.TopK(x, k, outputs=2, axis=-1, largest=int(largest), sorted=1)

    def constant(self, value: Any, dtype: type[np.generic]) -> ir.Value:
        """A constant of this dtype."""
        tensor = ir.tensor(np.asarray(value, dtype=dtype))
        result: ir.Value = self._tape.op("Constant", [], {"value": tensor})
        return result

    def i64(self, *values: int) -> ir.Value:
        """A one-dimensional int64 constant, as shapes, axes and slice bounds want it."""
        return self.constant(values, np.int64)

    def scalar(self, value: float, dtype: type[np.generic] = np.float32) -> ir.Value:
        """A zero-dimensional constant."""
        return self.constant(value, dtype)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``x`` as another element type."""
        return self.Cast(x, to=dtype.value)

    def reshape(self, x: ir.Value, *sizes: int) -> ir.Value:
        """Reshape to constant sizes (0 keeps an axis, -1 infers one)."""
        return self.Reshape(x, self.i64(*sizes))

    def slice(self, x: ir.Value, start: int, stop: int, axis: int) -> ir.Value:
        """``x[..., start:stop, ...]`` along one axis."""
        return self.Slice(x, self.i64(start), self.i64(stop), self.i64(axis))

    def size(self, x: ir.Value, axis: int) -> ir.Value:
        """The size of one axis, as an int64 tensor of shape [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def branch(
        self,
        condition: ir.Value,
        then: Callable[[BodyBuilder], ir.Value],
        otherwise: Callable[[BodyBuilder], ir.Value],
    ) -> ir.Value:
        """``If`` with one output: each branch records its own nodes and may read outer values."""
        self._branches += 1
        path = f"{self._scope}if{self._branches}"

        def graph(build: Callable[[BodyBuilder], ir.Value], name: str) -> ir.Graph:
            scope = f"{path}.{name}."
            inner = BodyBuilder(scope)
            result = build(inner)
            # An inner name must not hide one of an outer graph, where names are numbered too.
            values = [value for node in inner.nodes for value in node.outputs]
            for index, value in enumerate(values):
                value.name = f"{scope}{index}"
            return ir.Graph([], [result], nodes=inner.nodes, name=name)

        return self.If(
            condition,
            then_branch=graph(then, "then"),
            else_branch=graph(otherwise, "otherwise"),
        )


def static_size(value: ir.Value, axis: int) -> int:
    """The static size of an axis of a value; ValueError where it is dynamic or unknown."""
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise ValueError(f"{value.name}: axis {axis} must be static, got {size}")
    return size
