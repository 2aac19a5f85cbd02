"""Exported graphs of earlier builds, by the code and the arguments that an export reads.

torch's exporter takes seconds for every graph, and many tests build engines of the same few tiny
models. The content store keeps each graph until the exporter's code or a library changes. A test
gets its own copy of a graph. It equals the exported one except for numbers in the names that passes
add later: see :func:`exported_anew`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
from content_store import content_store, digest
from source_tree import SourceTree, source_tree, versions
from torch import nn
from traced_reads import Reads, agree, seen, traced

from specbuild.builder import graphs
from specbuild.builder.graph.repeated_blocks import BlockPorts, kind_of

Export = Callable[..., ir.Model]
_EXPORTS: dict[str, Export] = {
    name: getattr(graphs, name) for name in ("target_graph", "draft_fuse_graph", "draft_graph")
}
_EXPORT_BLOCK = graphs.block_graph
# For each export: the arguments that a stored graph has read, by the graph's key.
_READS: dict[str, dict[str, Reads]] = {name: {} for name in (*_EXPORTS, "block_graph")}
_READS_FILE, _GRAPH_FILE = "reads.json", "graph.onnx"


def share_exports() -> None:
    """Let ``builder.graphs`` read graphs from the store."""
    _read_torch_once()
    shared = {name: _shared(name, export) for name, export in _EXPORTS.items()}
    _replace({**shared, "block_graph": _shared_block})


@contextlib.contextmanager
def exported_anew() -> Iterator[None]:
    """Export every graph again and store none, for tests of the exporter itself."""
    before = {name: getattr(graphs, name) for name in (*_EXPORTS, "block_graph")}
    _replace({**_EXPORTS, "block_graph": _EXPORT_BLOCK})
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
    """Return a stored graph of a block, which depends only on the block's kind."""
    kind = kind_of(block, ports)
    found = _found("block_graph", (kind,))
    if found is None:
        found = _EXPORT_BLOCK(block, ports)
        _store("block_graph", found, {(0,): seen(kind)})
    return found.clone()


def _exported(name: str, *arguments: Any) -> None:
    """Export a graph and store it."""
    reads: Reads = {}
    followed = [traced(value, (i,), reads) for i, value in enumerate(arguments)]
    model = _EXPORTS[name](*followed)
    _store(name, model, reads)


def exporter_sources(tree: SourceTree) -> frozenset[Path]:
    """Return the code of families, ops and passes that an export runs, and of this module."""
    starts = [tree.root / "builder" / "graphs.py", tree.root / "tests" / "shared_graphs.py"]
    return tree.closure([*starts, *tree.root.glob("tests/seed_oss_family/*.py")])


def exporter_digest(tree: SourceTree) -> str:
    """Return a digest of :func:`exporter_sources` and the versions of libraries."""
    return digest(tree.digest(exporter_sources(tree)), versions())


@cache
def _kind(name: str) -> str:
    return f"{name}-{exporter_digest(source_tree())}"


def _found(name: str, arguments: tuple[Any, ...]) -> ir.Model | None:
    store, kind, known = content_store(), _kind(name), _READS[name]
    for key in store.keys(kind):
        if key not in known and (entry := store.find(kind, key)) is not None:
            listed = json.loads((entry / _READS_FILE).read_text())
            known[key] = {tuple(place): value for place, value in listed}
    key = next((key for key, reads in known.items() if agree(reads, arguments)), None)
    return None if key is None else _loaded(store.folder / kind / key / _GRAPH_FILE)


@cache
def _loaded(file: Path) -> ir.Model:
    return ir.from_proto(onnx.load(file, load_external_data=False))


def _store(name: str, model: ir.Model, reads: Reads) -> None:
    """Store a graph. An exported weight has a name, a type and a shape, but no data."""
    for weight, value in model.graph.initializers.items():
        assert value.const_value is not None and value.shape is not None
        value.const_value = ir.ExternalTensor(
            "checkpoint", 0, 0, dtype=value.const_value.dtype, shape=value.shape, name=weight
        )
    text = json.dumps(list(reads.items()))

    def write(entry: Path) -> None:
        (entry / _READS_FILE).write_text(text)
        graph = ir.to_proto(model).SerializeToString(deterministic=True)
        (entry / _GRAPH_FILE).write_bytes(graph)

    content_store().made(_kind(name), digest(text), write)


def _read_torch_once() -> None:
    """Cache what the exporter reads of torch for every graph.

    It parses the source of all its translations, reads their signatures, and lists torch's
    composite ops. This takes half of the time of a small graph.
    """
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
