"""Plugins in the registry of a library with TensorRT's interfaces, called through C++.

TensorRT's lean runtime and TensorRT-RTX are on PyPI. Their plugin code is TensorRT's own. The lean
runtime has neither a builder nor the names of tensor formats.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorrt_caller import (
    RUNTIME,
    CalledPlugin,
    CppRegistry,
    Creator,
    dynamic_descs,
    tensor_descs,
)

from specbuild.runtime.executors.tensorrt.creators import register_creators
from specbuild.runtime.executors.tensorrt.plugin_record import (
    NAMESPACE,
    PluginRecord,
    read_fields,
    wire_dtype,
    wire_shapes,
)

LEAN = "tensorrt_lean_bindings"
# The shared library whose process-wide registry a module's creators are in.
_REGISTRIES = {
    LEAN: ("tensorrt_lean_libs", "libnvinfer_lean.so.*"),
    "tensorrt_rtx": ("tensorrt_rtx_libs", "libtensorrt_rtx.so.*"),
}
MODULES = tuple(_REGISTRIES)
_EXTRAS = {LEAN: "tensorrt-lean", "tensorrt_rtx": "tensorrt-rtx"}

Tensors = list[tuple[str, Sequence[int]]]
# A creator stays registered, so the GPU on which its plugins run is looked up when they first run.
_gpus: list[Any] = []


def lack(name: str) -> str | None:
    """Return the reason a module cannot be used here, or None."""
    if all(importlib.util.find_spec(part) for part in (name, _REGISTRIES[name][0])):
        return None
    return f"{name} is not installed: pip install '.[{_EXTRAS[name]}]'"


def load(name: str) -> ModuleType:
    """Return the module."""
    return importlib.import_module(name)


def registered(trt: Any, record: PluginRecord, gpu: Any = None) -> Creator:
    """Return the C++ interface of the creator for a record; its plugins run on ``gpu``."""
    _gpus[:] = [gpu]
    register_creators(trt, {record.name: record.plugin_version}, lambda: _gpus[0])
    package, pattern = _REGISTRIES[trt.__name__]
    (library,) = Path(str(load(package).__file__)).parent.glob(pattern)
    creator = CppRegistry.of(library).creator(record.name, record.plugin_version, NAMESPACE)
    assert creator is not None
    return creator


def created(trt: Any, fields: Mapping[str, bytes], phase: int, gpu: Any = None) -> CalledPlugin:
    """Return the plugin that C++ creates from fields."""
    record, _ = read_fields(fields)
    plugin = registered(trt, record, gpu).create("node", fields, phase)
    assert plugin is not None
    return plugin


def bucket_tensors(record: PluginRecord, bucket: int = 0) -> tuple[Tensors, Tensors]:
    """Return element types and shapes of a bucket's inputs and outputs, as TensorRT sees them."""
    shapes = record.buckets[bucket]
    inputs = zip(record.inputs, wire_shapes(record.inputs, shapes.inputs), strict=True)
    outputs = zip(record.outputs, shapes.outputs, strict=True)
    return (
        [(wire_dtype(spec.dtype), shape) for spec, shape in inputs],
        [(wire_dtype(spec.dtype), shape) for spec, shape in outputs],
    )


def enqueue_called(
    trt: Any, gpu: Any, fields: Mapping[str, bytes], addresses: Sequence[int], scratch: int,
    stream: int = 0,
) -> None:  # fmt: skip
    """Create a plugin, attach it to a context, and enqueue its op, all through C++."""
    record, _ = read_fields(fields)
    plugin = created(trt, fields, RUNTIME, gpu).attach()
    assert plugin is not None
    inputs, outputs = bucket_tensors(record)
    descs = tensor_descs(inputs), tensor_descs(outputs)
    assert plugin.change_shapes(*descs) == 0
    assert plugin.set_tactic(0) == 0
    cut = len(inputs)
    assert plugin.enqueue(descs, addresses[:cut], addresses[cut:], scratch, stream) == 0


def dynamic(record: PluginRecord) -> tuple[Any, Any]:
    """Return descriptions of a bucket's inputs and outputs for a profile of that size."""
    inputs, outputs = bucket_tensors(record)
    return dynamic_descs(inputs), dynamic_descs(outputs)
