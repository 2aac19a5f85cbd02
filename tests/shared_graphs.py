"""Exports of a test run, each made once: a graph is a function of what it reads of its arguments.

torch's exporter takes seconds for every graph, and many tests build engines of the same few tiny
models. A test gets a graph of its own, which it may change. It is the exported one but for the
numbers in the names that passes give later: see :func:`exported_anew`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
from run_store import digest, shared_folder
from torch import nn
from traced_reads import Reads, agree, seen, traced

from specbuild.builder import graphs
from specbuild.builder.graph.repeated_blocks import BlockPorts, kind_of

Export = Callable[..., ir.Model]
_EXPORTS: dict[str, Export] = {
    name: getattr(graphs, name) for name in ("target_graph", "draft_fuse_graph", "draft_graph")
}
_EXPORT_BLOCK = graphs.block_graph
# Of each export: the file of every graph that this process knows, what it holds for, and itself.
_KNOWN: dict[str, dict[Path, tuple[Reads, ir.Model]]] = {
    name: {} for name in (*_EXPORTS, "block_graph")
}


def share_exports() -> None:
    """Lets ``builder.graphs`` take a graph that this run has exported already."""
    _read_torch_once()
    shared = {name: _shared(name, export) for name, export in _EXPORTS.items()}
    _replace({**shared, "block_graph": _shared_block})


@contextlib.contextmanager
def exported_anew() -> Iterator[None]:
    """Every graph is exported again: for a test that compares builds byte for byte.

    Other tests may take it.
    """
    before = {name: getattr(graphs, name) for name in (*_EXPORTS, "block_graph")}
    anew = {name: partial(_exported, name) for name in _EXPORTS}
    _replace({**anew, "block_graph": _EXPORT_BLOCK})
    try:
        yield
    finally:
        _replace(before)


def _replace(exports: dict[str, Export]) -> None:
    for name, export in exports.items():
        setattr(graphs, name, export)


def _shared(name: str, export: Export) -> Export:
    @wraps(export)
    def known(*arguments: Any) -> ir.Model:
        found = _found(name, arguments)
        if found is None:
            _exported(name, *arguments)
            found = _found(name, arguments)
        assert found is not None
        return found.clone()

    return known


def _shared_block(block: nn.Module, ports: BlockPorts) -> ir.Model:
    """A block's graph is a function of its kind."""
    kind = kind_of(block, ports)
    found = _found("block_graph", (kind,))
    if found is None:
        found = _EXPORT_BLOCK(block, ports)
        _store("block_graph", found.clone(), {(0,): seen(kind)})
    return found.clone()


def _exported(name: str, *arguments: Any) -> ir.Model:
    """The graph as it is exported now; it is stored too."""
    reads: Reads = {}
    followed = [traced(value, (i,), reads) for i, value in enumerate(arguments)]
    model = _EXPORTS[name](*followed)
    _store(name, model.clone(), reads)
    return model


def _found(name: str, arguments: tuple[Any, ...]) -> ir.Model | None:
    known = _KNOWN[name]
    for file in shared_folder().glob(f"{name}-*.json"):
        if file not in known:
            reads = {tuple(place): value for place, value in json.loads(file.read_text())}
            model = onnx.load(file.with_suffix(".onnx"), load_external_data=False)
            known[file] = reads, ir.from_proto(model)
    return next((model for reads, model in known.values() if agree(reads, arguments)), None)


def _store(name: str, model: ir.Model, reads: Reads) -> None:
    """An exported weight has a name, a type and a shape; its data comes from a checkpoint."""
    for weight, value in model.graph.initializers.items():
        assert value.const_value is not None and value.shape is not None
        value.const_value = ir.ExternalTensor(
            "checkpoint", 0, 0, dtype=value.const_value.dtype, shape=value.shape, name=weight
        )
    text = json.dumps(list(reads.items()))
    file = shared_folder() / f"{name}-{digest(text)}.json"
    _write(file.with_suffix(".onnx"), ir.to_proto(model).SerializeToString(deterministic=True))
    _write(file, text.encode())


def _write(file: Path, data: bytes) -> None:
    """Nobody sees half a file."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.rename(file)


def _read_torch_once() -> None:
    """For every graph the exporter parses the source of all its translations, reads all their
    signatures, and asks for all of torch's composite ops: half of what a small graph takes."""
    exporter = "torch.onnx._internal.exporter"
    registration = importlib.import_module(f"{exporter}._registration")
    listed = registration.onnxscript_apis.get_torchlib_ops
    registration.onnxscript_apis = SimpleNamespace(get_torchlib_ops=cache(listed))
    for name, function in (
        (f"{exporter}._schemas", "op_signature_from_function"),
        ("torch._export.utils", "_materialize_cpp_cia_ops"),
    ):
        module = importlib.import_module(name)
        setattr(module, function, cache(getattr(module, function)))
