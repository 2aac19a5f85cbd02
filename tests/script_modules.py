"""Scripts of the repository as modules: benchmarks, examples, and writers of documents."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def script_modules(folder: Path, *names: str) -> Iterator[dict[str, ModuleType]]:
    """Yield the named scripts of a folder, which may import each other.

    They are removed from ``sys.modules`` afterwards, since other folders have scripts of the same
    names. ``names`` therefore includes the modules of the folder that the scripts import.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            sys.modules.pop(name, None)


def load_script(file: Path) -> ModuleType:
    """Return a script as a new module, which stays in ``sys.modules`` for its dataclasses."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
