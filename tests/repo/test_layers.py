"""Imports within runtime/ and builder/ follow a table that states what each layer may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A layer is a folder or a file; a module belongs to the layer with the longest matching path. Every
# layer may import itself, and the layers listed here. `runtime` alone is its __init__.
RUNTIME = {
    "errors": "",
    "parameters": "errors",
    "sampling": "errors parameters",
    "generate_params": "errors guides parameters sampling",
    "engine_dir": "errors runtime generate_params parameters sampling",
    "device": "engine_dir",
    "executors": "errors engine_dir device cache sampling",
    "cache": "errors engine_dir",
    "records": "",
    "text": "errors",
    "statistics": "records",
    "guides": "errors",
    "settings": "errors engine_dir parameters",
    "request": "errors cache generate_params guides parameters records sampling statistics text",
    "draft": "errors engine_dir cache executors request sampling",
    "lossy": "errors engine_dir cache executors records request",
    "decode": "errors engine_dir cache guides records sampling statistics text request executors "
    "draft lossy settings",
    "decode/host": "errors engine_dir cache guides sampling statistics request executors draft "
    "lossy decode settings",
    "decode/device": "errors engine_dir cache guides sampling request executors draft lossy "
    "decode settings",
    "engine_base": "errors engine_dir executors draft decode request text",
    "request_checks": "engine_dir errors generate_params text",
    "engine": "engine_base request_checks errors engine_dir cache guides sampling text request "
    "executors draft decode decode/host decode/device settings",
    "serve": "errors engine_dir cache generate_params guides parameters records sampling text "
    "request draft decode engine settings",
    "measure": "errors engine_dir cache executors records request sampling draft decode "
    "decode/device engine settings",
}
BUILDER = {
    "durable": "",
    "progress": "",
    "svg": "",
    "option_group": "",
    "option_readers": "",
    "suffix_options": "option_group",
    "tensorrt_options": "option_group",
    "kernel_options": "option_group",
    "options": "kernel_options option_group option_readers suffix_options tensorrt_options",
    "yaml_file": "",
    "speculative_config": "option_group options yaml_file",
    "checkpoint": "durable",
    "backends/cuda/kernel_limits": "",
    "backends/cuda/step": "graph engine",
    "families": "checkpoint backends/cuda/kernel_limits backends/cuda/step",
    "graph": "checkpoint",
    "engine": "durable progress option_group options checkpoint graph",
    "op_graphs": "families graph",
    "graphs": "progress families graph engine op_graphs",
    "backends/foreign_options": "kernel_options tensorrt_options options",
    "backends/unlowered_parts": "",
    "backends/backend": "options progress graph engine",
    "backends/cpu": "options progress checkpoint graph engine backends/backend "
    "backends/foreign_options",
    "backends/cuda": "durable options progress checkpoint families graph engine backends/backend "
    "backends/foreign_options backends/unlowered_parts backends/cuda/kernel_limits "
    "backends/cuda/step",
    "backends/tensorrt": "durable tensorrt_options options progress backends/foreign_options",
    "backends/tensorrt/plugins": "options progress families graph engine backends/backend "
    "backends/cuda backends/cuda/step backends/tensorrt backends/unlowered_parts",
    "backends/tensorrt/standard": "options progress families graph engine backends/backend "
    "backends/tensorrt backends/unlowered_parts",
    "backends/registry": "backends/backend backends/cpu backends/cuda backends/tensorrt/plugins "
    "backends/tensorrt/standard",
    "inputs": "options progress checkpoint families graph engine backends/backend",
    "kept_graphs": "durable progress graph graphs engine inputs backends/backend",
    "build": "options progress graph graphs engine inputs kept_graphs backends/backend "
    "backends/registry",
    "synth": "durable progress option_group option_readers options checkpoint families build",
    "training": "durable progress svg option_group option_readers checkpoint families",
    "verify": "progress checkpoint families training",
}
LAYERS = {"runtime": RUNTIME, "builder": BUILDER}
# Single modules that may be imported against the table, with reasons.
EXCEPTIONS = {
    ("runtime/statistics", "runtime/lossy/specpv/state"): "counts the results of a state",
    ("runtime/statistics", "runtime/lossy/dsa/state"): "counts the results of a state",
    ("builder/backends/backend", "builder/backends/cuda/report"): "the type of a report",
    ("builder/backends/backend", "builder/backends/tensorrt/request"): "the type of a report",
    ("builder/build", "builder/backends/cuda/report"): "the type of a report",
    ("builder/build", "builder/backends/tensorrt/request"): "the type of a report",
    ("builder/build", "builder/checkpoint/quantization"): "the type of a report",
    ("builder/graph", "builder/families/parts"): "ports and rotary tables of all families",
    ("builder/families", "builder/synth"): "random weights of synthetic models of a family",
}


def layer_of(name: str, package: str) -> str:
    """Return the layer of a module path, such as ``runtime/cache/pages``."""
    rest = name.removeprefix(package).removeprefix("/")
    layers = [r for r in LAYERS[package] if rest == r or rest.startswith(f"{r}/")]
    return max(layers, key=len) if layers else package


@cache
def imports_of(source: str) -> list[tuple[list[str], bool]]:
    """Return the modules that a file imports from others, and whether a function imports them."""
    tree = ast.parse(source)
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ast.walk(node)
        if isinstance(part, ast.ImportFrom)
    }
    return [
        (f"{node.module}.{alias.name}".split("."), id(node) in inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def own_imports(source: str, package: str, *, late: bool = False) -> Iterator[str]:
    """Yield the imported modules of the package as paths; with ``late``, those within functions."""
    for module, in_function in imports_of(source):
        if module[:2] == ["specbuild", package] and (in_function or not late):
            yield "/".join(module[1:])


def files_of(package: str) -> list[tuple[str, str]]:
    return [
        (str(file.relative_to(ROOT).with_suffix("")).removesuffix("/__init__"), file.read_text())
        for file in sorted((ROOT / package).rglob("*.py"))
    ]


def allowed(table: Mapping[str, str], package: str, layer: str) -> set[str]:
    return {layer, package} | set(table[layer].split()) if layer in table else {package}


def is_exception(importer: str, imported: str) -> tuple[str, str] | None:
    for entry in EXCEPTIONS:
        who, what = entry
        if f"{importer}/".startswith(f"{who}/") and f"{imported}/".startswith(f"{what}/"):
            return entry
    return None


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_allowed_layers_only(package: str) -> None:
    table = LAYERS[package]
    violations = [
        f"{name} imports {module}"
        for name, source in files_of(package)
        for module in own_imports(source, package)
        if layer_of(module, package) not in allowed(table, package, layer_of(name, package))
        and is_exception(name, module) is None
    ]
    assert not violations


@pytest.mark.parametrize("package", LAYERS)
def test_the_table_is_acyclic_and_current(package: str) -> None:
    table = LAYERS[package]
    graph = {layer: set(names.split()) - {package} for layer, names in table.items()}
    assert set().union(*graph.values()) <= set(table)
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError
    folders = {name for name, _ in files_of(package)}
    assert all(f"{package}/{layer}" in folders for layer in table)


def test_every_exception_is_used() -> None:
    used = {
        is_exception(name, module)
        for package in LAYERS
        for name, source in files_of(package)
        for module in own_imports(source, package)
    }
    assert set(EXCEPTIONS) <= used


def test_functions_import_no_module_of_specbuild() -> None:
    """A late import of our own hides a cycle; heavy external libraries may be imported late."""
    packages = ("runtime", "plugins_cuda", "builder")
    late = [
        f"{name} imports {module}"
        for package in packages
        for name, source in files_of(package)
        for other in packages
        for module in own_imports(source, other, late=True)
    ]
    assert not late
