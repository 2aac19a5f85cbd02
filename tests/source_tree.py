"""The source files that a module depends on, and one digest over them."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from content_store import digest

ROOT = Path(__file__).parents[1]
# Folders from which a test module imports by a plain name.
TEST_FOLDERS = ("tests", "tests/ops", "tests/unit/runtime", "benchmarks")
OPS, REGISTRY = "plugins_cuda", "plugins_cuda/registry.py"
# Its computed names are those of ops in the registry.
KERNEL_CASE = "builder/backends/cuda/tuning/kernel_case.py"
# Much faster than a parser. A docstring line that looks like an import only adds a file.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))",
    re.MULTILINE,
)
_NAME = re.compile(r"[A-Za-z_][\w.]*")
LIBRARIES = (
    "torch", "numpy", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "ml-dtypes", "transformers",
)  # fmt: skip


class SourceTree:
    """The Python files of a checkout and their imports of each other."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._neighbours: dict[Path, frozenset[Path]] = {}
        self._files_of = cache(self._module_files)

    def closure(
        self, starts: Iterable[Path], op_folders: Collection[str] | None = None
    ) -> frozenset[Path]:
        """Return these files, their direct and indirect imports, and JSON in the same folders.

        A source file that imports computed names depends on its whole package, as the registry
        depends on every op. ``op_folders`` restricts the ops.
        """
        found: set[Path] = set()
        registry = self.root / REGISTRY
        waiting = list(starts)
        if op_folders is not None:
            waiting += [file for name in op_folders for file in self._package(OPS, name)]
        while waiting:
            file = waiting.pop()
            if file in found:
                continue
            found.add(file)
            if file == registry and op_folders is not None:
                continue
            waiting += self._imported(file)
        folders = {file.parent for file in found}
        return frozenset(found.union(*(folder.glob("*.json") for folder in folders)))

    def digest(self, files: Iterable[Path]) -> str:
        """Return a digest of the names and contents of these files."""
        parts = [
            part
            for file in sorted(files)
            for part in (str(file.relative_to(self.root)), file.read_bytes())
        ]
        return digest(*parts)

    def _imported(self, file: Path) -> frozenset[Path]:
        if file not in self._neighbours:
            source = file.read_text(encoding="utf-8")
            files = {found for name in _imports(source) for found in self._files_of(name)}
            place = file.relative_to(self.root).as_posix()
            if "import_module(" in source and not place.startswith(("tests/", KERNEL_CASE)):
                files.update(file.parent.rglob("*.py"))
            self._neighbours[file] = frozenset(files)
        return self._neighbours[file]

    def _module_files(self, module: str) -> frozenset[Path]:
        """Return the module's file and those of its packages; none of another project."""
        parts = module.split(".")
        tops, own = (
            ([self.root], parts[1:])
            if parts[0] == "specbuild"
            else ([self.root / folder for folder in TEST_FOLDERS], parts)
        )
        paths = [top.joinpath(*own[:end]) for top in tops for end in range(1, len(own) + 1)]
        files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
        return frozenset(file for file in files if file.is_file())

    def _package(self, *parts: str) -> list[Path]:
        return list(self.root.joinpath(*parts).rglob("*.py"))


def _imports(source: str) -> Iterator[str]:
    """Return the names of all modules that a file may import; aliases may be modules too."""
    for package, aliases, modules in _IMPORT.findall(source):
        for name in _NAME.findall(aliases or modules):
            yield f"{package}.{name}" if package else name


@cache
def source_tree() -> SourceTree:
    """Return the tree of this checkout. Each file is read once per process."""
    return SourceTree()


@cache
def versions() -> str:
    """Return the versions of Python and of the libraries that exports and references use."""
    known = {dist.metadata["Name"].lower(): dist.version for dist in _installed()}
    return repr((sys.version, [(name, known.get(name)) for name in LIBRARIES]))


def _installed() -> Iterator[metadata.Distribution]:
    for name in LIBRARIES:
        try:
            yield metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
