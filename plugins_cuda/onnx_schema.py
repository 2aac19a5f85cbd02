"""ONNX schemas of the ops, derived from their declarations."""

from __future__ import annotations

from functools import cache

import onnx
from onnx.defs import OpSchema

from specbuild.plugins_cuda.opspec import (
    DOMAIN,
    OPSET_VERSION,
    TYPE_NAMES,
    AttributeSpec,
    OpSpec,
    TensorSpec,
)
from specbuild.plugins_cuda.registry import all_ops

_ATTRIBUTE_TYPES = {
    int: OpSchema.AttrType.INT,
    float: OpSchema.AttrType.FLOAT,
    str: OpSchema.AttrType.STRING,
}


def _type_letter(tensor: TensorSpec) -> str:
    # Weight inputs differ in type (uint8 blocks, bf16 biases), so each needs its own type letter.
    return f"W_{tensor.name}" if tensor.dtype == "W" else tensor.dtype


def _parameter(tensor: TensorSpec) -> OpSchema.FormalParameter:
    option = (
        OpSchema.FormalParameterOption.Optional
        if tensor.optional
        else OpSchema.FormalParameterOption.Single
    )
    axes = "rank depends on the format" if tensor.rank_free else f"[{', '.join(tensor.axes)}]"
    fixed = tensor.dtype in ("float32", "int32")
    type_name = f"tensor({TYPE_NAMES[tensor.dtype][0]})" if fixed else _type_letter(tensor)
    return OpSchema.FormalParameter(tensor.name, type_name, axes, param_option=option)


def _attribute(attribute: AttributeSpec) -> OpSchema.Attribute:
    if attribute.default is None:
        return OpSchema.Attribute(attribute.name, _ATTRIBUTE_TYPES[attribute.type], required=True)
    default = onnx.helper.make_attribute(attribute.name, attribute.type(attribute.default))
    return OpSchema.Attribute(attribute.name, default)


def schema_of(op: OpSpec) -> OpSchema:
    """Return the ONNX schema of a declaration."""
    letters = {
        _type_letter(tensor): tensor.dtype
        for tensor in (*op.inputs, *op.outputs)
        if tensor.dtype in ("T", "C", "W")
    }
    constraints = [
        (letter, [f"tensor({name})" for name in TYPE_NAMES[dtype]], "")
        for letter, dtype in letters.items()
    ]
    return OpSchema(
        op.name,
        DOMAIN,
        OPSET_VERSION,
        doc=op.doc,
        inputs=[_parameter(tensor) for tensor in op.inputs],
        outputs=[_parameter(tensor) for tensor in op.outputs],
        type_constraints=constraints,
        attributes=[_attribute(attribute) for attribute in op.attributes],
    )


@cache
def register_schemas() -> None:
    """Register every op with ``onnx.defs``, once per process."""
    for op in all_ops().values():
        onnx.defs.register_schema(schema_of(op))
