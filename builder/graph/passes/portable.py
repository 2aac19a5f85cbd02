"""Writes a graph without its weights, which are declared external, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE


def portable_proto(model: ir.Model, places: Mapping[str, int] | None = None) -> onnx.ModelProto:
    """Return the model as a proto whose weights are external data of the weights file.

    ``places`` are the offsets of the weights in the file. Without them the graph is never loaded
    with its weights, and offsets are 0.
    """
    externals = {}
    for name, value in model.graph.initializers.items():
        recipe = recipe_of(value)
        if recipe is not None:
            assert value.dtype is not None and value.shape is not None
            externals[name] = value.const_value
            value.const_value = ir.ExternalTensor(
                WEIGHTS_FILE,
                0 if places is None else places[name],
                recipe.nbytes,
                dtype=value.dtype,
                shape=value.shape,
                name=name,
            )
    try:
        return ir.to_proto(model)
    finally:
        for name, tensor in externals.items():
            model.graph.initializers[name].const_value = tensor


def portable_bytes(model: ir.Model, places: Mapping[str, int] | None = None) -> bytes:
    """Return :func:`portable_proto` as a file."""
    return portable_proto(model, places).SerializeToString(deterministic=True)


def save_portable(model: ir.Model, path: Path) -> None:
    """Write :func:`portable_bytes`, and create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(portable_bytes(model))
