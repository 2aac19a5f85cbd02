"""What a wheel holds: every sub-package and every kernel source, nothing generic."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = ("builder", "cli", "plugins_cuda", "runtime")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def source_packages() -> set[str]:
    """Every folder below the top level that holds an ``__init__.py``, as installed."""
    return {
        "specbuild." + ".".join(file.parent.relative_to(ROOT).parts)
        for top in TOP_LEVEL
        for file in (ROOT / top).rglob("__init__.py")
    }


def test_every_folder_with_code_is_a_package() -> None:
    folders = {
        "specbuild." + ".".join(file.parent.relative_to(ROOT).parts)
        for top in TOP_LEVEL
        for file in (ROOT / top).rglob("*.py")
    }
    assert folders == source_packages()


def test_pyproject_lists_every_package() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == source_packages()


def test_every_top_level_folder_is_mapped() -> None:
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {f"specbuild.{name}": name for name in TOP_LEVEL}


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from a copy of the sources, with two kernel files added."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in TOP_LEVEL:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kv_write/kernel.cu", "kv_write/tile.cuh"):
        (source / "plugins_cuda" / name).touch()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, timeout=120)
    (wheel,) = folder.glob("specbuild-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_source_file(wheel_files: set[str]) -> None:
    sources = {
        f"specbuild/{file.relative_to(ROOT).as_posix()}"
        for top in TOP_LEVEL
        for pattern in ("*.py", "*.cu", "*.cuh", "py.typed")
        for file in (ROOT / top).rglob(pattern)
    }
    assert sources <= wheel_files


def test_wheel_holds_the_tactic_files(wheel_files: set[str]) -> None:
    folder = "builder/backends/cuda/tactics"
    files = {f"specbuild/{folder}/{file.name}" for file in (ROOT / folder).glob("*.json")}
    assert files and files <= wheel_files


def test_wheel_takes_kernel_sources(wheel_files: set[str]) -> None:
    assert "specbuild/plugins_cuda/kv_write/kernel.cu" in wheel_files
    assert "specbuild/plugins_cuda/kv_write/tile.cuh" in wheel_files


def test_wheel_puts_nothing_generic_into_site_packages(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specbuild"}


def test_running_needs_neither_torch_nor_onnx() -> None:
    project = PYPROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = {requirement.split(">")[0] for requirement in needed}
    assert names == {
        "numpy",
        "safetensors",
        "xxhash",
        "tokenizers",
        "jinja2",
        "typer",
        "rich",
        "onnxruntime",
    }


def test_constraints_pin_every_direct_dependency() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    pinned = {name.lower().replace("_", "-") for name in pins}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["build"], *extras["dev"]]
    names = {requirement.split(">")[0].split("[")[0] for requirement in wanted} - {"specbuild"}
    assert names <= pinned
    assert pins["torch"] == "2.13.0"
