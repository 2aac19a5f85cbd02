"""The standard-ONNX forms of every op: its body, and the alternatives of lowerings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from body_session import run_body, run_record, value_like
from onnx.reference import ReferenceEvaluator

from specbuild.builder.backends.tensorrt.standard.ops import (
    FP4,
    INT8,
    LOWERINGS,
    ExpertStorage,
    moe,
)
from specbuild.builder.graph.passes.cleanup import remove_unused
from specbuild.builder.graph.passes.weights import Recipe, recipe_of, weight_value
from specbuild.plugins_cuda.body import STANDARD_OPSET, BodyBuilder
from specbuild.plugins_cuda.moe.chosen import chosen_body, chosen_weights
from specbuild.plugins_cuda.moe.contrib import contrib_body, contrib_weights
from specbuild.plugins_cuda.moe.dense import dense_body, dense_weights
from specbuild.plugins_cuda.opspec import OpSpec

Arrays = Sequence[np.ndarray | None]
Run = Callable[[OpSpec, Arrays, Mapping[str, Any]], list[np.ndarray]]


def portable(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the body with every size of a launch dynamic."""
    return run_body(op, arrays, dict(attributes))


def one_sequence(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the attention body for a static batch of 1."""
    return run_body(op, arrays, dict(attributes), static_axes=frozenset({"B"}))


def moe_dense(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return all experts as two Gemms."""
    complete = op.complete(attributes)
    settings = {name: complete[name] for name in ("alpha", "activation")}
    weights = dense_weights(*_tensors(arrays[2:8]), **settings)
    return _moe(arrays, weights, complete, dense_body)


def moe_contrib(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return ONNX Runtime's own operator."""
    complete = op.complete(attributes)
    return _moe(arrays, contrib_weights(*_tensors(arrays[2:8])), complete, contrib_body)


def moe_chosen(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return a loop over the experts that any row selected."""
    complete = op.complete(attributes)

    def body(b: Any, x: Any, logits: Any, bias: Any, named: dict[str, Any], *rest: Any, **_: Any):
        return chosen_body(b, x, (logits, bias, named.pop("expert_scale", None)), named, *rest)

    given = _expert_scale(arrays)
    scale = {} if given is None else {"expert_scale": torch.from_numpy(given)}
    return _moe(arrays, {**scale, **chosen_weights(*_tensors(arrays[2:8]))}, complete, body)


def _expert_scale(arrays: Arrays) -> np.ndarray | None:
    return arrays[9] if len(arrays) > 9 else None


def tensorrt_form(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the form for TensorRT-RTX if it differs from the body."""
    return run_body(replace(op, body=LOWERINGS[op.name]), arrays, dict(attributes))


def tensorrt_one_sequence(
    op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]
) -> list[np.ndarray]:
    """Return this form for a static batch of 1."""
    form = replace(op, body=LOWERINGS[op.name])
    return run_body(form, arrays, dict(attributes), static_axes=frozenset({"B"}))


def moe_tensorrt(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Return all experts at once, MXFP4 in eight bits: ONNX Runtime has no four-bit floats."""
    return run_standard_moe(op, arrays, attributes, INT8)


def run_standard_moe(
    op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any], storage: ExpertStorage
) -> list[np.ndarray]:
    """Run Moe in its TensorRT-RTX form, with onnx's evaluator for ops ONNX Runtime lacks."""
    model = standard_moe(op, arrays, attributes, storage)
    feed = dict(zip(("x", "router_logits"), arrays, strict=False))
    if storage is FP4:
        return ReferenceEvaluator(model).run(None, feed)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def standard_moe(
    op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any], storage: ExpertStorage
) -> onnx.ModelProto:
    """Return the graph of this form, including the weights."""
    names = [spec.name for spec in op.inputs]
    x, logits = (value_like(names[i], arrays[i], dynamic=(0,)) for i in range(2))
    graph = ir.Graph([x, logits], [], nodes=[], opset_imports={"": STANDARD_OPSET}, name="moe")
    weights: list[ir.Value | None] = []
    left_out = [None] * (len(names) - len(arrays))
    for name, tensor in zip(names[2:], _tensors([*arrays[2:], *left_out]), strict=True):
        if tensor is None:
            weights.append(None)
            continue
        recipe = Recipe(tuple(tensor.shape), tensor.dtype, (), lambda tensor=tensor: tensor)
        weights.append(weight_value(name, recipe))
        graph.register_initializer(weights[-1])
    b = BodyBuilder()
    [y] = moe(b, [x, logits, *weights], op.complete(attributes), graph, storage)
    graph.extend(b.nodes)
    y.name, y.type, y.shape = "y", x.type, x.shape
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=11)
    remove_unused(model)
    for value in graph.initializers.values():
        tensor = recipe_of(value).checked()
        packed = tensor if tensor.dtype != torch.bfloat16 else tensor.view(torch.int16)
        value.const_value = ir.Tensor(
            _PACKED.get(value.dtype, lambda a: a)(packed.numpy()),
            dtype=value.dtype,
            shape=value.shape,
            name=value.name,
        )
    return ir.to_proto(model)


_PACKED = {
    ir.DataType.FLOAT4E2M1: lambda a: (
        np.stack([a & 15, a >> 4], axis=-1).reshape(*a.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)
    ),
    ir.DataType.BFLOAT16: lambda a: a.view(ml_dtypes.bfloat16),
}


def _tensors(arrays: Arrays) -> list[torch.Tensor | None]:
    return [None if array is None else torch.from_numpy(array) for array in arrays]


def _moe(
    arrays: Arrays,
    weights: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],
    body: Callable[..., Any],
) -> list[np.ndarray]:
    x, logits = arrays[:2]
    assert x is not None and logits is not None
    experts = logits.shape[1]
    bias = {} if arrays[8] is None else {"choice_bias": arrays[8]}

    def record(b: Any, values: Sequence[Any]) -> list[Any]:
        named = dict(zip((*bias, *weights), values[2:], strict=True))
        chosen_by = named.pop("choice_bias", None)
        return [body(b, values[0], values[1], chosen_by, named, attributes, experts=experts)]

    return run_record(
        ["x", "router_logits", *bias, *weights],
        [x, logits, *bias.values(), *(tensor.numpy() for tensor in weights.values())],
        record,
        dynamic=lambda name, axis: name in ("x", "router_logits") and axis == 0,
    )


def forms_of(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> dict[str, Run]:
    """Return every form that is defined for these inputs, by name."""
    forms: dict[str, Run] = {"portable": portable}
    if op.name in ("PagedTreeAttention", "MlaAttention"):
        table = arrays[[spec.name for spec in op.inputs].index("page_table")]
        assert table is not None
        if table.shape[0] == 1:
            forms["one sequence"] = one_sequence
    if op.name in LOWERINGS:
        forms["TensorRT-RTX"] = tensorrt_form
        if "one sequence" in forms:
            forms["TensorRT-RTX, one sequence"] = tensorrt_one_sequence
    if op.name == "Moe":
        activation = op.complete(attributes)["activation"]
        scaled = _expert_scale(arrays) is not None
        forms["chosen"] = moe_chosen
        if activation != "geglu_tanh" and not scaled:
            forms |= {"dense": moe_dense, "contrib": moe_contrib}
        if activation == "swiglu_clamped" and not scaled:
            forms["TensorRT-RTX"] = moe_tensorrt
    return forms
