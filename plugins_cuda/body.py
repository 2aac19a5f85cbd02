"""The builder of standard-ONNX bodies of ops.

It records nodes, so that a body reads like a formula.

A body is ``body(b, inputs, attributes) -> outputs``. ``b`` records nodes, ``inputs`` are the op's
inputs in declared order (None for an absent one), ``attributes`` are complete. A body may use the
rank and the static sizes of its inputs only. It becomes part of a graph of opset 23 in which all
tensors of type T are fp32. A later pass merges equal expressions, such as the attention mask of
all layers, so bodies need not share nodes.

A weighted body also takes ``derive(name, parents, make) -> ir.Value``. It declares a weight that
``make(*parents)`` computes with plain torch when the engine is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

STANDARD_OPSET = 23
CONTRIB_DOMAIN = "com.microsoft"
BOOL, FLOAT, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64

DeriveWeight = Callable[[str, Sequence[ir.Value | None], Callable[..., Any]], ir.Value]


class Record(Protocol):
    """Record one node of an op type: inputs by position, attributes by keyword."""

    @overload
    def __call__(
        self, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]: ...

    @overload
    def __call__(
        self, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value: ...


class BodyBuilder:
    """A recorder of ONNX nodes; ``b.MatMul(x, y)`` appends a node and returns its first output."""

    def __init__(self, scope: str = "") -> None:
        self._tape = Tape()
        self._scope = scope
        self._subgraphs = 0

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """The recorded nodes, in order."""
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
        """Return values and int64 indices of the ``k`` best along the last axis, best first.

        ``k`` is int64 [1]. Ties go to the lower index.
        """
        return self.TopK(x, k, outputs=2, axis=-1, largest=int(largest), sorted=1)

    def constant(self, value: Any, dtype: type[np.generic]) -> ir.Value:
        """Record a constant of this dtype."""
        tensor = ir.tensor(np.asarray(value, dtype=dtype))
        result: ir.Value = self._tape.op("Constant", [], {"value": tensor})
        return result

    def i64(self, *values: int) -> ir.Value:
        """Record a one-dimensional int64 constant, the type of shapes, axes and slice bounds."""
        return self.constant(values, np.int64)

    def scalar(self, value: float, dtype: type[np.generic] = np.float32) -> ir.Value:
        """Record a zero-dimensional constant."""
        return self.constant(value, dtype)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Convert ``x`` to another element type."""
        return self.Cast(x, to=dtype.value)

    def reshape(self, x: ir.Value, *sizes: int) -> ir.Value:
        """Reshape to constant sizes (0 keeps an axis, -1 infers one)."""
        return self.Reshape(x, self.i64(*sizes))

    def slice(self, x: ir.Value, start: int, stop: int, axis: int) -> ir.Value:
        """Return ``x[..., start:stop, ...]`` along one axis."""
        return self.Slice(x, self.i64(start), self.i64(stop), self.i64(axis))

    def size(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the size of one axis, as an int64 tensor of shape [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def branch(
        self,
        condition: ir.Value,
        then: Callable[[BodyBuilder], ir.Value],
        otherwise: Callable[[BodyBuilder], ir.Value],
    ) -> ir.Value:
        """Record ``If`` with one output; each branch records nodes and may read outer values."""
        self._subgraphs += 1
        path = f"{self._scope}if{self._subgraphs}"

        def graph(build: Callable[[BodyBuilder], ir.Value], name: str) -> ir.Graph:
            inner = BodyBuilder(f"{path}.{name}.")
            result = build(inner)
            return inner._graph([], [result], name)

        return self.If(
            condition,
            then_branch=graph(then, "then"),
            else_branch=graph(otherwise, "otherwise"),
        )

    def repeat(
        self,
        times: ir.Value,
        state: Sequence[ir.Value],
        dtype: ir.DataType,
        step: Callable[[BodyBuilder, Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> Sequence[ir.Value]:
        """Record ``Loop``: apply ``step`` repeatedly to values of one type that keep their shapes.

        ``times`` is an int64 scalar. The step records nodes and may read outer values.
        """
        self._subgraphs += 1
        inner = BodyBuilder(f"{self._scope}loop{self._subgraphs}.")
        number = ir.Value(type=ir.TensorType(INT64), shape=ir.Shape([]))
        again = ir.Value(type=ir.TensorType(BOOL), shape=ir.Shape([]))
        values = [ir.Value(type=ir.TensorType(dtype)) for _ in state]
        results = [inner.Identity(again), *step(inner, values)]
        for result, kind in zip(results, (BOOL, *[dtype] * len(state)), strict=True):
            result.type = ir.TensorType(kind)
        body = inner._graph([number, again, *values], results, "step")
        outputs_after: Sequence[ir.Value] = self._tape.op_multi_out(
            "Loop",
            [times, self.constant(True, np.bool_), *state],
            {"body": body},
            num_outputs=len(state),
        )
        return outputs_after

    def _graph(
        self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str
    ) -> ir.Graph:
        # Names of inner graphs must differ from names of outer graphs, which are numbered too.
        values = [*inputs, *(value for node in self.nodes for value in node.outputs)]
        for index, value in enumerate(values):
            value.name = f"{self._scope}{index}"
        return ir.Graph(inputs, outputs, nodes=self.nodes, name=name)


def static_size(value: ir.Value, axis: int) -> int:
    """Return the static size of an axis; ValueError if it is dynamic or unknown."""
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise ValueError(f"{value.name}: axis {axis} must be static, got {size}")
    return size
