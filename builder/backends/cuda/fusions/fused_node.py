"""Builds the nodes of fusions, with the types and shapes of their outputs, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tape import Tape

from specbuild.builder.graph.passes.weights import Recipe, derive, recipe_of, set_recipe
from specbuild.plugins_cuda.linear.packing import pack_rows
from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.plugins_cuda.registry import op_named

ACTIVATIONS = ir.DataType.BFLOAT16
# The types of an op's outputs in a CUDA engine.
_TYPES = {
    "T": ACTIVATIONS,
    "C": ACTIVATIONS,
    "float32": ir.DataType.FLOAT,
    "int32": ir.DataType.INT32,
}
# The dynamic axes of a launch: its rows, and the rows that need logits.
ROWS, LOGIT_ROWS = "T", "R"
# The dynamic axes of sparse steps (DSA): sequences, and entries of a row's list.
SEQUENCES, LIST_LENGTH = "B", "S"

_JOINED = "specbuild.joined"

Sizes = Sequence[int | str]


def place(
    before: ir.Node,
    name: str,
    inputs: Mapping[str, ir.Value | None],
    sizes: Sequence[Sizes | ir.Shape],
    **attributes: Any,
) -> Sequence[ir.Value]:
    """Insert a ``specbuild::`` node before another and return its outputs with these sizes.

    ``inputs`` has the declared names. Absent optional inputs are None or omitted.
    """
    op = op_named(name)
    declared = [tensor.name for tensor in op.inputs]
    missing = {t.name for t in op.inputs if not t.optional and inputs.get(t.name) is None}
    if missing or not set(inputs) <= set(declared):
        raise AssertionError(
            f"{name}: expected the inputs {declared}, got {sorted(inputs)}, missing {missing}"
        )
    tape = Tape()
    outputs = tape.op_multi_out(
        name,
        [inputs.get(tensor) for tensor in declared],
        op.complete(attributes),
        num_outputs=len(op.outputs),
        domain=DOMAIN,
    )
    for value, spec, shape in zip(outputs, op.outputs, sizes, strict=True):
        value.type, value.shape = ir.TensorType(_TYPES[spec.dtype]), ir.Shape(shape)
    graph = before.graph
    assert graph is not None
    graph.insert_before(before, list(tape.nodes))
    return outputs


def packed(
    graph: ir.Graph,
    name: str,
    weights: Sequence[ir.Value | None],
    pack: Callable[..., torch.Tensor],
) -> ir.Value:
    """Return a weight in the layout of kernels: ``pack`` of these weights, floats in bf16."""

    def make(*tensors: torch.Tensor | None) -> torch.Tensor:
        return pack(*(None if t is None else _rounded(t) for t in tensors))

    return derive(graph, name, [stored(weight) for weight in weights], make)


@dataclass(frozen=True)
class JoinedRows:
    """The weights that form a packed weight, and ``join``, which orders their rows.

    ``join`` takes one tensor [rows, …] per weight.
    """

    recipes: tuple[Recipe, ...]
    join: Callable[..., torch.Tensor]


def packed_rows(
    graph: ir.Graph,
    name: str,
    weights: Sequence[ir.Value | None],
    join: Callable[..., torch.Tensor],
) -> ir.Value:
    """Join the rows of ``weights`` by ``join`` and pack them with ``pack_rows``."""
    value = packed(graph, name, weights, lambda *tensors: pack_rows(join(*tensors)))
    recipes = [recipe_of(stored(weight)) for weight in weights]
    value.meta[_JOINED] = JoinedRows(tuple(recipe for recipe in recipes if recipe), join)
    return value


def joined_rows(value: ir.Value | None) -> JoinedRows | None:
    """Return the weights that :func:`packed_rows` joined; None for other values."""
    return None if value is None else value.meta.get(_JOINED)


def as_bf16(value: ir.Value | None) -> ir.Value | None:
    """Return an unpacked weight in bf16, or None for None."""
    return _retyped(value, torch.bfloat16)


def as_fp32(value: ir.Value | None) -> ir.Value | None:
    """Return an unpacked weight in fp32, or None for None."""
    return _retyped(value, torch.float32)


def stored(value: ir.Value | None) -> ir.Value | None:
    """Return the weight before the casts of the portable graph."""
    while value is not None and recipe_of(value) is None:
        cast = value.producer()
        if cast is None or cast.op_type != "Cast":
            raise AssertionError(f"{value.name} is not a weight")
        value = cast.inputs[0]
    return value


def stem(weight: ir.Value | None) -> str:
    """Return the name of a weight without the suffix ``.weight``."""
    weight = stored(weight)
    assert weight is not None and weight.name is not None
    return weight.name.removesuffix(".weight")


def static(value: ir.Value | None, axis: int) -> int:
    """Return the size of a constant axis."""
    assert value is not None and value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int), f"{value.name}: axis {axis} is {size}"
    return size


def _retyped(value: ir.Value | None, dtype: torch.dtype) -> ir.Value | None:
    weight = stored(value)
    if weight is None:
        return None
    recipe = recipe_of(weight)
    assert recipe is not None
    if recipe.dtype != dtype:
        load, less = recipe.load, int(recipe.less_1)
        recipe_in_dtype = Recipe(
            recipe.shape, dtype, recipe.sources, lambda: (load() - less).to(dtype)
        )
        set_recipe(
            weight, replace(recipe_in_dtype, less_1=recipe.less_1, quantized=recipe.quantized)
        )
    return weight


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
