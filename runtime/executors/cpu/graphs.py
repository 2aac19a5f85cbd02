"""Compares the graphs of an engine with its manifest before ONNX Runtime opens them.

The runtime relies on the manifest's description of a graph. The graph must therefore have the same
ports, ops, and tensors in the weights file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import (
    WEIGHTS_FILE,
    Manifest,
    Port,
    Role,
    StoredTensor,
)
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError
from specbuild.runtime.executors.cpu.onnx_graph import (
    ExternalTensor,
    GraphPort,
    OnnxGraph,
    read_onnx,
)
from specbuild.runtime.executors.cpu.role_ports import check_ports
from specbuild.runtime.executors.cpu.wire_format import WireError

# ONNX's numbers of element types, by their names in manifests and as safetensors spells them.
_ELEMENTS = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool"}
_ELEMENTS |= {10: "float16", 11: "float64", 16: "bfloat16"}
_STORED = {"F32": 1, "U8": 2, "I8": 3, "I32": 6, "I64": 7, "BOOL": 9, "F16": 10, "F64": 11}
_STORED |= {"BF16": 16}
# Fields that are parsed one by one: the graphs of large models have 1 MB.
MAX_GRAPH_BYTES = 16 << 20


def read_graphs(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    """Return the bytes of every role's graph by its file, compared with the manifest.

    Raises EngineFileError if a graph reads an unlisted file, differs from the manifest, or is
    invalid.
    """
    check_ports(manifest)
    graphs = {}
    for role in manifest.roles.values():
        entry = manifest.files.get(role.file)
        if entry is not None and entry.bytes > MAX_GRAPH_BYTES:
            raise OutdatedEngineError(
                f"{directory}: {role.file} has {entry.bytes} bytes, no graph has over "
                f"{MAX_GRAPH_BYTES}"
            )
        data = bytes(read_file(directory, manifest, role.file))
        try:
            check_graph(read_onnx(data), role, manifest.tensors)
        except (WireError, EngineFileError) as error:
            raise OutdatedEngineError.of(f"{directory}: {role.file}", error) from error
        graphs[role.file] = data
    return graphs


def check_probe(directory: Path, name: str, data: bytes) -> bytes:
    """Return a graph without a role; EngineFileError if it reads a file or is invalid."""
    try:
        external = read_onnx(data).external
    except WireError as error:
        raise OutdatedEngineError.of(f"{directory}: {name}", error) from error
    if external:
        raise OutdatedEngineError(
            f"{directory}: {name} reads tensor {external[0].name!r} from a file"
        )
    return data


def check_graph(graph: OnnxGraph, role: Role, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise EngineFileError for the first difference of a graph from its role."""
    _check_ports("input", graph.inputs, role.inputs)
    _check_ports("output", graph.outputs, role.outputs)
    if dict(graph.ops) != role.ops:
        differing = sorted(
            name
            for name in graph.ops.keys() | role.ops.keys()
            if graph.ops.get(name, 0) != role.ops.get(name, 0)
        )
        raise EngineFileError(
            f"it has other ops than the manifest says: {', '.join(differing[:3])}"
        )
    values = [*graph.initializers, *(port.name for port in graph.inputs)]
    if len(set(values)) < len(values):
        raise EngineFileError("two of its inputs and initialisers share a name")
    _check_external(graph.external, role, tensors)


def _check_ports(kind: str, actual: Sequence[GraphPort], stated: Sequence[Port]) -> None:
    if [port.name for port in actual] != [port.name for port in stated]:
        raise EngineFileError(f"it has other {kind}s than the manifest says")
    for port, expected in zip(actual, stated, strict=True):
        element, shape = _ELEMENTS.get(port.element), _shown_shape(port)
        if (element, shape) != (expected.dtype, expected.shape):
            raise EngineFileError(
                f"{kind} {port.name} is {element} {shape and list(shape)}, the manifest says "
                f"{expected.dtype} {list(expected.shape)}"
            )


def _shown_shape(port: GraphPort) -> tuple[int | str, ...] | None:
    """Return the shape as a manifest states it."""
    if port.shape is None:
        return None
    return tuple(str(axis) if axis is None else axis for axis in port.shape)


def _check_external(
    external: Sequence[ExternalTensor], role: Role, tensors: Mapping[str, StoredTensor]
) -> None:
    """Check that the engine stores every tensor without values, under its name."""
    for tensor in external:
        place = tensor.location["location"]
        if tensor.nested or tensor.name not in role.tensors or place != WEIGHTS_FILE:
            raise EngineFileError(
                f"it reads tensor {tensor.name!r} from file {place!r}, which the manifest does not "
                "list for it"
            )
        stored = tensors[tensor.name]
        if (tensor.element, tensor.shape) != (_STORED[stored.dtype], stored.shape):
            raise EngineFileError(
                f"tensor {tensor.name} is {_ELEMENTS.get(tensor.element)} {list(tensor.shape)}, "
                f"the manifest says {stored.dtype} {list(stored.shape)}"
            )
    absent = sorted(set(role.tensors) - {tensor.name for tensor in external})
    if absent or len(set(role.tensors)) < len(role.tensors):
        raise EngineFileError(f"it has no tensors {absent[:3]}, which the manifest lists for it")
