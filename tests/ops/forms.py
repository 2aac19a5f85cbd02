"""The standard-ONNX forms of every op: its body, and whatever else the CPU lowering may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from body_session import run_body, run_record

from specbuild.plugins_cuda.moe.contrib import contrib_body, contrib_weights
from specbuild.plugins_cuda.moe.dense import dense_body, dense_weights
from specbuild.plugins_cuda.opspec import OpSpec

Arrays = Sequence[np.ndarray | None]
Run = Callable[[OpSpec, Arrays, Mapping[str, Any]], list[np.ndarray]]


def portable(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """The body with every size of a launch dynamic."""
    return run_body(op, arrays, dict(attributes))


def one_sequence(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """The attention body that a static batch of 1 selects."""
    return run_body(op, arrays, dict(attributes), static_axes=frozenset({"B"}))


def moe_dense(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """All experts as two Gemms."""
    complete = op.complete(attributes)
    settings = {name: complete[name] for name in ("alpha", "activation")}
    weights = dense_weights(*_tensors(arrays[2:8]), **settings)
    return _moe(arrays, weights, complete, dense_body)


def moe_contrib(op: OpSpec, arrays: Arrays, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """ONNX Runtime's own operator."""
    complete = op.complete(attributes)
    return _moe(arrays, contrib_weights(*_tensors(arrays[2:8])), complete, contrib_body)


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
    """Every form that is defined for these inputs, by name."""
    forms: dict[str, Run] = {"portable": portable}
    if op.name in ("PagedTreeAttention", "MlaAttention"):
        table = arrays[[spec.name for spec in op.inputs].index("page_table")]
        assert table is not None
        if table.shape[0] == 1:
            forms["one sequence"] = one_sequence
    if op.name == "Moe":
        forms |= {"dense": moe_dense, "contrib": moe_contrib}
    return forms
