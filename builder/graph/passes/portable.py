"""Writes a graph without its weights: they are declared external, by name."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE


def portable_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto in which every weight is external data of the weights file.

    Offsets are left at 0: whoever loads the graph finds a weight by its name.
    """
    kept = {}
    for name, value in model.graph.initializers.items():
        recipe = recipe_of(value)
        if recipe is not None:
            assert value.dtype is not None and value.shape is not None
            kept[name] = value.const_value
            value.const_value = ir.ExternalTensor(
                WEIGHTS_FILE, 0, recipe.nbytes, dtype=value.dtype, shape=value.shape, name=name
            )
    try:
        return ir.to_proto(model)
    finally:
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = tensor


def portable_bytes(model: ir.Model) -> bytes:
    """:func:`portable_proto` as a file that Netron opens without the weights."""
    return portable_proto(model).SerializeToString(deterministic=True)


def save_portable(model: ir.Model, path: Path) -> None:
    """Writes :func:`portable_bytes`, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(portable_bytes(model))
