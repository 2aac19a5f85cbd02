"""Rooms are imported one way: what a file may import is a table, and it has no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A capacity is a folder or a file; the longest name that begins a module's is its capacity. Every
# capacity may import itself, and those named here. `runtime` alone is its __init__.
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
    "decode/device": "errors engine_dir cache sampling request executors draft lossy decode "
    "settings",
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
ROOMS = {"runtime": RUNTIME, "builder": BUILDER}
# Single modules that may be imported against the table, and why.
EXCEPTIONS = {
    ("runtime/statistics", "runtime/lossy/specpv/state"): "counts what a state tells",
    ("runtime/statistics", "runtime/lossy/dsa/state"): "counts what a state tells",
    ("builder/backends/backend", "builder/backends/cuda/report"): "the type of a report",
    ("builder/backends/backend", "builder/backends/tensorrt/request"): "the type of a report",
    ("builder/build", "builder/backends/cuda/report"): "the type of a report",
    ("builder/build", "builder/backends/tensorrt/request"): "the type of a report",
    ("builder/build", "builder/checkpoint/quantization"): "the type of a report",
    ("builder/graph", "builder/families/parts"): "ports and rotary tables of all families",
    ("builder/families", "builder/synth"): "random weights, which a family's own are made of",
}


def room_of(name: str, package: str) -> str:
    """The capacity of a module named with slashes, as ``runtime/cache/pages``."""
    rest = name.removeprefix(package).removeprefix("/")
    capacities = [r for r in ROOMS[package] if rest == r or rest.startswith(f"{r}/")]
    return max(capacities, key=len) if capacities else package


@cache
def imports_of(source: str) -> list[tuple[list[str], bool]]:
    """Modules that a file imports from others by name, and whether a function does."""
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
    """Modules of the package that a file imports, with slashes; the ``late`` ones in functions."""
    for module, in_function in imports_of(source):
        if module[:2] == ["specbuild", package] and (in_function or not late):
            yield "/".join(module[1:])


def files_of(package: str) -> list[tuple[str, str]]:
    return [
        (str(file.relative_to(ROOT).with_suffix("")).removesuffix("/__init__"), file.read_text())
        for file in sorted((ROOT / package).rglob("*.py"))
    ]


def allowed(table: Mapping[str, str], package: str, capacity: str) -> set[str]:
    return {capacity, package} | set(table[capacity].split()) if capacity in table else {package}


def is_exception(importer: str, imported: str) -> tuple[str, str] | None:
    for entry in EXCEPTIONS:
        who, what = entry
        if f"{importer}/".startswith(f"{who}/") and f"{imported}/".startswith(f"{what}/"):
            return entry
    return None


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_what_the_table_says(package: str) -> None:
    table = ROOMS[package]
    wrong = [
        f"{name} imports {module}"
        for name, source in files_of(package)
        for module in own_imports(source, package)
        if room_of(module, package) not in allowed(table, package, room_of(name, package))
        and is_exception(name, module) is None
    ]
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_the_table_has_no_circle_and_no_room_that_is_gone(package: str) -> None:
    table = ROOMS[package]
    graph = {capacity: set(names.split()) - {package} for capacity, names in table.items()}
    assert set().union(*graph.values()) <= set(table)
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError
    folders = {name for name, _ in files_of(package)}
    assert all(f"{package}/{capacity}" in folders for capacity in table)


def test_every_exception_is_used() -> None:
    used = {
        is_exception(name, module)
        for package in ROOMS
        for name, source in files_of(package)
        for module in own_imports(source, package)
    }
    assert set(EXCEPTIONS) <= used


def test_functions_import_no_module_of_ours() -> None:
    """A late import of ours hides a circle; heavy libraries of others may wait for their use."""
    packages = ("runtime", "plugins_cuda", "builder")
    late = [
        f"{name} imports {module}"
        for package in packages
        for name, source in files_of(package)
        for other in packages
        for module in own_imports(source, other, late=True)
    ]
    assert not late
