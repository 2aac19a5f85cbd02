"""Writes a graph without its weights: they are declared external, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from specbuild.builder.graph.passes.weights import recipe_of
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE


def portable_proto(model: ir.Model, places: Mapping[str, int] | None = None) -> onnx.ModelProto:
    """The model as a proto in which every weight is external data of the weights file beside it.

    ``places`` are the weights' first bytes in the file. Without them the graph is one that nobody
    loads with its weights, and offsets are 0.
    """
    kept = {}
    for name, value in model.graph.initializers.items():
        recipe = recipe_of(value)
        if recipe is not None:
            assert value.dtype is not None and value.shape is not None
            kept[name] = value.const_value
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
        for name, tensor in kept.items():
            model.graph.initializers[name].const_value = tensor


def portable_bytes(model: ir.Model, places: Mapping[str, int] | None = None) -> bytes:
    """:func:`portable_proto` as a file."""
    return portable_proto(model, places).SerializeToString(deterministic=True)


def save_portable(model: ir.Model, path: Path) -> None:
    """Writes :func:`portable_bytes`, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(portable_bytes(model))
