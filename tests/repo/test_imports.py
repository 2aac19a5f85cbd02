"""Imports go one way: runtime ← plugins_cuda ← builder ← cli; and the runtime stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_time import least_cost

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "runtime": {"runtime"},
    "plugins_cuda": {"runtime", "plugins_cuda"},
    "builder": {"runtime", "plugins_cuda", "builder"},
    "cli": {"runtime", "plugins_cuda", "builder", "cli"},
}
HEAVY = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "specbuild.builder",
    "specbuild.plugins_cuda",
)
# what `import specbuild.runtime.engine` may load beside the standard library
LIGHT_ON_IMPORT = ("onnxruntime", "tokenizers", "jinja2", "rich", "typer")


def imported_modules(source: str) -> Iterator[str]:
    """Every module that a file imports anywhere, under its absolute name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            module = node.module or ""
            # `from specbuild import runtime` names its sub-package in the alias
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package: str) -> None:
    wrong = []
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        for module in imported_modules(file.read_text(encoding="utf-8")):
            parts = module.split(".")
            if parts[0] == "specbuild" and parts[1] not in MAY_IMPORT[package]:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
            if parts[0] in MAY_IMPORT:
                wrong.append(f"{file.relative_to(ROOT)} imports {module} without specbuild.")
    assert not wrong


def test_runtime_names_no_heavy_package() -> None:
    heavy = {name for name in HEAVY if not name.startswith("specbuild.")}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted((ROOT / "runtime").rglob("*.py"))
        for module in imported_modules(file.read_text(encoding="utf-8"))
        if module.split(".")[0] in heavy
    ]
    assert not wrong


def test_decoding_imports_nothing_that_measures() -> None:
    """``runtime/measure`` is read by ``bench`` and ``tune`` only."""
    capacities = ("decode", "draft", "lossy", "cache", "executors")
    files = [
        file
        for capacity in capacities
        for file in sorted((ROOT / "runtime" / capacity).rglob("*.py"))
    ]
    assert len(files) > len(capacities)
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in (*files, ROOT / "runtime" / "engine.py")
        for module in imported_modules(file.read_text(encoding="utf-8"))
        if module.startswith("specbuild.runtime.measure")
    ]
    assert not wrong


def test_every_runtime_module_imports_lightly() -> None:
    modules = [
        "specbuild." + ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in sorted((ROOT / "runtime").rglob("*.py"))
        if file.name != "__init__.py" and file.parent.name != "executors"
    ]
    assert "specbuild.runtime.engine" in modules
    imports = "\n".join(f"import {module}" for module in modules)
    loaded = loaded_modules(imports)
    assert not loaded & {*HEAVY, *LIGHT_ON_IMPORT}


@pytest.mark.speed
def test_importing_the_runtime_is_fast() -> None:
    cost = least_cost([sys.executable, "-c", "import specbuild.runtime.engine"])
    assert cost.ratio < 1.5, cost


def test_command_line_starts_without_heavy_packages() -> None:
    loaded = loaded_modules("import specbuild.cli.main")
    assert not loaded & {*HEAVY, "onnxruntime", "tokenizers", "matplotlib"}


def test_the_command_line_reads_only_the_command_that_is_asked_for() -> None:
    # reading all of them takes a third of the time of `specbuild check`
    loaded = loaded_modules("from specbuild.cli.main import command_line; command_line('check')")
    folders = ("specbuild.cli.commands.", "specbuild.cli.bench.")
    assert {name for name in loaded if name.startswith(folders)} == {"specbuild.cli.commands.check"}


def test_what_check_reads_needs_no_numpy() -> None:
    # a tenth of its half second
    loaded = loaded_modules(
        "import specbuild.runtime.executors.cpu.check, specbuild.runtime.executors.registry"
    )
    assert "numpy" not in loaded


def loaded_modules(code: str) -> set[str]:
    """What ``sys.modules`` holds after ``code`` ran in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.split())
