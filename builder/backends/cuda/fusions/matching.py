"""Matches nodes of the graph through casts between float types and through reshapes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import attribute, constant_array, producer
from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.plugins_cuda.rms_norms import Rounding

_LAYOUT = ("Reshape", "Unsqueeze")


@dataclass(frozen=True)
class Norm:
    """An RMS norm of ``x``.

    With ``rounding`` "gpt_oss" the weight is multiplied before the cast to the activations' dtype,
    with "llama" after it. "offset" is like "gpt_oss" with the factor 1 + weight.
    """

    x: ir.Value
    weight: ir.Value
    eps: float
    rounding: Rounding

    @property
    def casts_first(self) -> bool:
        """Whether the cast precedes the multiplication by the weight."""
        return self.rounding == "llama"


def origin(value: ir.Value | None) -> ir.Value | None:
    """Return the value before casts."""
    while (cast := producer(value, "Cast")) is not None:
        value = cast.inputs[0]
    return value


def layout_origin(value: ir.Value | None) -> ir.Value | None:
    """Return the value before casts, reshapes and unsqueezes."""
    while (node := None if value is None else value.producer()) is not None:
        if node.op_type not in (*_LAYOUT, "Cast"):
            break
        value = node.inputs[0]
    return value


def origin_node(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node of this type that produces ``value``, through casts."""
    return producer(origin(value), op_type)


def linear_of(value: ir.Value | None) -> ir.Node | None:
    """Return the ``Gemm(x, weight [N, K], bias [N]?)`` that produces ``value``, through layout."""
    return producer(layout_origin(value), "Gemm")


def sigmoid_gate(node: ir.Node | None) -> tuple[ir.Value, ir.Node] | None:
    """Return the value and the gate's projection of ``value · sigmoid(gate(x))``.

    None for SiLU, other products and other nodes.
    """
    if node is None or node.op_type != "Mul":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        sigmoid = origin_node(other, "Sigmoid")
        gate = None if sigmoid is None else linear_of(sigmoid.inputs[0])
        if gate is not None and value is not None and linear_of(value) is not gate:
            return value, gate
    return None


def norm_of(value: ir.Value | None) -> Norm | None:
    """Return the norm that produces ``value``, through casts."""
    node = origin_node(value, "RMSNormalization")
    return None if node is None else read_norm(node)


def read_norm(node: ir.Node) -> Norm:
    """Return an ``RMSNormalization`` with the casts around it.

    GPT-OSS's norm runs in fp32 including its weight, LLaMA's in the activations' dtype.
    """
    x, weight = origin(node.inputs[0]), origin(node.inputs[1])
    assert x is not None and weight is not None
    in_fp32 = node.outputs[0].dtype == ir.DataType.FLOAT
    eps = float(attribute(node, "epsilon", 1e-5))
    recipe = recipe_of(weight)
    if in_fp32 and recipe is not None and recipe.less_1:
        return Norm(x, weight, eps, "offset")
    return Norm(x, weight, eps, "gpt_oss" if in_fp32 else "llama")


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the only user of a value if it has this type; None for graph outputs."""
    users = list(value.uses())
    if len(users) != 1 or value.is_graph_output() or users[0].node.op_type != op_type:
        return None
    return users[0].node


def constant_factor(node: ir.Node | None, op_type: str = "Mul") -> float | None:
    """Return the constant that a node multiplies by, divides by (``Div``) or adds (``Add``).

    Returns None if there is none. The constant is the model's, before casts.
    """
    if node is None or node.op_type != op_type:
        return None
    array = constant_array(origin(node.inputs[1]))
    return float(array) if array is not None and array.size == 1 else None


def bias_of(gemm: ir.Node) -> ir.Value | None:
    """Return the third input of a Gemm."""
    return gemm.inputs[2] if len(gemm.inputs) > 2 else None
