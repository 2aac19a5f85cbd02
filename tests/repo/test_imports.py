"""Imports have one direction: runtime ← plugins_cuda ← builder ← cli; the runtime stays light."""

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
# modules that `import specbuild.runtime.engine` may load besides the standard library
LIGHT_ON_IMPORT = ("onnxruntime", "tokenizers", "jinja2", "rich", "typer")


def imported_modules(source: str) -> Iterator[str]:
    """Return every module that a file imports anywhere, with its absolute name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            module = node.module or ""
            # `from specbuild import runtime` names its sub-package in the alias
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_have_one_direction(package: str) -> None:
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


def test_the_runtime_imports_no_heavy_package() -> None:
    heavy = {name for name in HEAVY if not name.startswith("specbuild.")}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted((ROOT / "runtime").rglob("*.py"))
        for module in imported_modules(file.read_text(encoding="utf-8"))
        if module.split(".")[0] in heavy
    ]
    assert not wrong


def test_decoding_does_not_import_measurements() -> None:
    """``runtime/measure`` is imported by ``bench`` and ``tune`` only."""
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


def test_every_runtime_module_is_light_to_import() -> None:
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


def test_the_command_line_starts_without_heavy_packages() -> None:
    loaded = loaded_modules("import specbuild.cli.main")
    assert not loaded & {*HEAVY, "onnxruntime", "tokenizers", "matplotlib"}


def test_the_command_line_imports_the_requested_command_only() -> None:
    # Importing all of them takes a third of the time of `specbuild check`.
    loaded = loaded_modules("from specbuild.cli.main import command_line; command_line('check')")
    folders = ("specbuild.cli.commands.", "specbuild.cli.bench.")
    assert {name for name in loaded if name.startswith(folders)} == {"specbuild.cli.commands.check"}


def test_check_does_not_import_numpy() -> None:
    # NumPy takes a tenth of its half second.
    loaded = loaded_modules(
        "import specbuild.runtime.executors.cpu.check, specbuild.runtime.executors.registry"
    )
    assert "numpy" not in loaded


def loaded_modules(code: str) -> set[str]:
    """Return the contents of ``sys.modules`` after ``code`` ran in a new interpreter."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.split())
