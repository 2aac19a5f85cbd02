"""Run a recorded standard-ONNX body with ONNX Runtime on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, STANDARD_OPSET, BodyBuilder
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec

Record = Callable[[BodyBuilder, Sequence[ir.Value | None]], Sequence[ir.Value]]


def value_like(name: str, array: np.ndarray, *, dynamic: Sequence[int] = ()) -> ir.Value:
    """Return a graph input of the array's type and shape; axes in ``dynamic`` are symbolic."""
    shape = [f"{name}_{axis}" if axis in dynamic else size for axis, size in enumerate(array.shape)]
    dtype = ir.DataType.from_numpy(array.dtype)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def session_of(inputs: Sequence[ir.Value], record: Callable[[BodyBuilder], Sequence[ir.Value]]):
    """Return a session of one model, with the nodes that ``record`` records."""
    b = BodyBuilder()
    # Identity: an output may be an input, and graph outputs need names of their own.
    outputs = [b.Identity(value) for value in record(b)]
    for index, output in enumerate(outputs):
        output.name = f"result{index}"
    graph = ir.Graph(
        list(inputs),
        outputs,
        nodes=b.nodes,
        name="body",
        opset_imports={"": STANDARD_OPSET, CONTRIB_DOMAIN: 1},
    )
    model = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_record(
    names: Sequence[str],
    arrays: Sequence[np.ndarray | None],
    record: Record,
    dynamic: Callable[[str, int], bool] = lambda _name, _axis: False,
) -> list[np.ndarray]:
    """Record on inputs of the arrays' shapes, run once, and return the outputs.

    ``dynamic(name, axis)`` returns whether an axis is unknown during recording.
    """
    values: list[ir.Value | None] = []
    for name, array in zip(names, arrays, strict=True):
        if array is None:
            values.append(None)
            continue
        axes = [axis for axis in range(array.ndim) if dynamic(name, axis)]
        values.append(value_like(name, array, dynamic=axes))
    present = [value for value in values if value is not None]
    session = session_of(present, lambda b: record(b, values))
    wanted = {entry.name for entry in session.get_inputs()}
    feed = {n: a for n, a in zip(names, arrays, strict=True) if a is not None and n in wanted}
    return session.run(None, feed)


# The sizes of a launch; every other axis is a property of the model and static.
LAUNCH_AXES = frozenset({"T", "B", "B1", "P", "W", "S", "R", "BF", "F", "M", "N1", "D1"})


def to_body_order(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Convert a pool from portable order to that of the body; return other arrays unchanged."""
    order = spec.body_permutation
    return array if order is None else np.ascontiguousarray(array.transpose(order))


def from_body_order(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Invert :func:`to_body_order`."""
    order = spec.body_permutation
    return array if order is None else array.transpose(np.argsort(order))


def run_body(
    op: OpSpec,
    arrays: Sequence[np.ndarray | None],
    attributes: dict[str, Any],
    *,
    static_axes: frozenset[str] = frozenset(),
) -> list[np.ndarray]:
    """Run the op's body on arrays in portable order; return portable outputs.

    Absent inputs at the end may be omitted.
    """
    assert op.body is not None, f"{op.name} has no body"
    complete = op.complete(attributes)
    axes = {spec.name: spec.axes for spec in op.inputs}

    def dynamic(name: str, axis: int) -> bool:
        names = axes[name]
        return bool(names) and names[axis] in LAUNCH_AXES - static_axes

    given = [*arrays, *[None] * (len(op.inputs) - len(arrays))]
    ordered = [
        None if array is None else to_body_order(spec, array)
        for spec, array in zip(op.inputs, given, strict=True)
    ]
    body = op.body
    results = run_record(
        [spec.name for spec in op.inputs],
        ordered,
        lambda b, values: body(b, values, complete),
        dynamic,
    )
    return [from_body_order(s, r) for s, r in zip(op.outputs, results, strict=True)]
