"""The contents of an installation: every package and kernel source, ``import specbuild``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = ("builder", "cli", "plugins_cuda", "runtime")
# it contains `specbuild` itself: a separate top-level folder would have two short files
TOP_PACKAGE = ROOT / "cli/specbuild"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def installed_folder(folder: Path) -> str:
    """Return where a folder of the sources is in site-packages."""
    if folder == TOP_PACKAGE:
        return "specbuild"
    return f"specbuild/{folder.relative_to(ROOT).as_posix()}"


def packages_with(pattern: str) -> set[str]:
    """Return the installed packages whose folders contain a matching file."""
    return {
        installed_folder(file.parent).replace("/", ".")
        for top in TOP_LEVEL
        for file in (ROOT / top).rglob(pattern)
    }


def source_packages() -> set[str]:
    return packages_with("__init__.py")


def test_every_folder_with_code_is_a_package() -> None:
    assert packages_with("*.py") == source_packages()


def test_pyproject_lists_every_package() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == source_packages()


def test_every_top_level_folder_is_mapped() -> None:
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {
        "specbuild": TOP_PACKAGE.relative_to(ROOT).as_posix(),
        **{f"specbuild.{name}": name for name in TOP_LEVEL},
    }


def test_the_top_package_hides_no_mapped_package() -> None:
    # an editable installation searches here for `specbuild.runtime` before it uses the mapping
    assert {file.name for file in TOP_PACKAGE.iterdir()} - {"__pycache__"} == {
        "__init__.py",
        "__main__.py",
        "py.typed",
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with two kernel files added."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in TOP_LEVEL:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kv_write/kernel.cu", "kv_write/tile.cuh"):
        (source / "plugins_cuda" / name).touch()
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the copy."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "-w", str(folder), str(source))
    (wheel,) = folder.glob("specbuild-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def pip(*arguments: str) -> None:
    """Return a pip command that uses installed packages only: nothing is downloaded."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*command, *arguments, *options], check=True, timeout=300)


def test_the_wheel_contains_every_source_file(wheel_files: set[str]) -> None:
    sources = {
        f"{installed_folder(file.parent)}/{file.name}"
        for top in TOP_LEVEL
        for pattern in ("*.py", "*.cu", "*.cuh", "py.typed")
        for file in (ROOT / top).rglob(pattern)
    }
    assert sources <= wheel_files


def test_the_wheel_contains_the_tactic_files(wheel_files: set[str]) -> None:
    folder = "builder/backends/cuda/tactics"
    files = {f"specbuild/{folder}/{file.name}" for file in (ROOT / folder).glob("*.json")}
    assert files and files <= wheel_files


def test_the_wheel_contains_the_web_page(wheel_files: set[str]) -> None:
    folder = "runtime/serve/page"
    files = {f"specbuild/{folder}/{file.name}" for file in (ROOT / folder).iterdir()}
    assert files and files <= wheel_files


def test_the_wheel_contains_kernel_sources(wheel_files: set[str]) -> None:
    assert "specbuild/plugins_cuda/kv_write/kernel.cu" in wheel_files
    assert "specbuild/plugins_cuda/kv_write/tile.cuh" in wheel_files


def test_the_wheel_adds_no_generic_name_to_site_packages(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specbuild"}


PUBLIC_NAMES = """
import sys, time

start_s = time.process_time()
import specbuild

assert time.process_time() - start_s < 0.05
assert "numpy" not in sys.modules
assert {
    "DraftSetting", "Engine", "EngineConfig", "GenerateParams", "Guide", "PrefillSchedule",
    "Prompt", "RuntimeSettings", "SpeculativeConfig", "__version__", "errors",
} == set(specbuild.__all__)
assert set(specbuild.__all__) <= set(dir(specbuild))
assert specbuild.__version__ == "VERSION"
from specbuild import Engine, GenerateParams, Prompt
import specbuild.builder, specbuild.cli, specbuild.plugins_cuda, specbuild.runtime.engine

assert Engine is specbuild.runtime.engine.Engine
try:
    specbuild.engine
except AttributeError as error:
    assert "no attribute 'engine'" in str(error)
else:
    raise AssertionError
print(specbuild.__file__)
""".replace("VERSION", PYPROJECT["project"]["version"])


def public_package(python: Path, **environment: str) -> Path:
    """Return the location of ``import specbuild``, after checking its names and its command."""

    def printed(*arguments: str) -> str:
        return subprocess.run(
            [python, "-P", *arguments],
            check=True,
            cwd=python.parent,
            env={"PATH": "", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout.strip()

    assert printed("-m", "specbuild", "--version") == PYPROJECT["project"]["version"]
    return Path(printed("-c", PUBLIC_NAMES))


def installed(into: Path, *what: str) -> Path:
    """Return the interpreter of a new environment with this installation."""
    venv.create(into, with_pip=False, symlinks=True)
    pip("install", "--ignore-installed", "--prefix", str(into), *what)
    (site,) = into.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_packages.pth").write_text("\n".join(here), encoding="utf-8")
    return into / "bin/python"


def test_a_wheel_has_the_public_names(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    result = public_package(Path(sys.executable), PYTHONPATH=str(tmp_path))
    assert result == tmp_path / "specbuild/__init__.py"


@pytest.mark.slow
def test_an_installed_wheel_has_the_public_names(wheel: Path, tmp_path: Path) -> None:
    result = public_package(installed(tmp_path, str(wheel)))
    assert result.is_relative_to(tmp_path)
    assert result.parts[-3:] == ("site-packages", "specbuild", "__init__.py")


@pytest.mark.slow
def test_an_installed_wheel_builds_and_runs_the_example(wheel: Path, tmp_path: Path) -> None:
    """Run the quickstart in a new environment, outside of the checkout and without its sources."""
    python = installed(tmp_path / "environment", str(wheel))
    example = shutil.copytree(ROOT / "examples/tiny-gpt-oss", tmp_path / "example")

    def command(*words: str | Path) -> str:
        return subprocess.run(
            [python, "-P", "-m", "specbuild", *words],
            check=True,
            cwd=tmp_path,
            env={"PATH": "", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout

    command("build", "--model", example / "target", "--draft", example / "draft",
            "--output", "engine")  # fmt: skip
    command("check", "engine")
    prompt = ("--prompt", "def __eq__(self, other):", "--max-new-tokens", "24", "--json")
    drafted, plain = (
        json.loads(command("run", "engine", *prompt, *more)) for more in ((), ("--no-spec",))
    )
    assert drafted["text"] == plain["text"] and len(plain["output_ids"]) == 24


@pytest.mark.slow
def test_an_editable_installation_has_the_public_names(source: Path, tmp_path: Path) -> None:
    result = public_package(installed(tmp_path, "--editable", str(source)))
    assert result == source / "cli/specbuild/__init__.py"


def test_running_needs_neither_torch_nor_onnx() -> None:
    project = PYPROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = {requirement.split(">")[0] for requirement in needed}
    assert names == {
        "numpy",
        "pygments",
        "safetensors",
        "xxhash",
        "tokenizers",
        "huggingface-hub",
        "jinja2",
        "typer",
        "rich",
        "pyyaml",
        "onnxruntime",
    }


def test_minimum_versions_of_libraries_with_fixed_faults() -> None:
    """Earlier ONNX Runtimes read files outside an engine, and jinja2's sandbox leaked."""
    project = PYPROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    floors = dict(requirement.split(">=") for requirement in needed if ">=" in requirement)
    assert tuple(map(int, floors["jinja2"].split("."))) >= (3, 1, 6)
    assert tuple(map(int, floors["onnxruntime"].split("."))) >= (1, 31)


def test_constraints_pin_every_direct_dependency() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    pinned = {name.lower().replace("_", "-") for name in pins}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    expected = [*project["dependencies"], *extras["cpu"], *extras["build"], *extras["dev"]]
    names = {requirement.split(">")[0].split("[")[0] for requirement in expected} - {"specbuild"}
    assert names <= pinned
    assert pins["torch"] == "2.13.0"
