"""Run command lines in this process as if some packages were not installed.

``python without_packages.py PACKAGE[,PACKAGE] COMMAND_LINES_AS_JSON`` prints one JSON list: the
exit code and the standard error of each command line.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from typing import Any


def hide(packages: set[str]) -> None:
    """Hide these packages and their metadata from now on."""
    distributions = {package.lower() for package in packages}

    class Hiding(PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
            hidden = fullname.partition(".")[0] in packages
            found: ModuleSpec | None = None if hidden else super().find_spec(fullname, path, target)
            return found

        @classmethod
        def find_distributions(cls, context: Any = None) -> Iterable[Distribution]:
            asked = DistributionFinder.Context() if context is None else context
            name = (asked.name or "").replace("-", "_").lower()
            return iter(()) if name in distributions else super().find_distributions(asked)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding


def run(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command, and its standard error."""
    from specbuild.cli.main import main

    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = main(arguments)
    return code, errors.getvalue()


def is_installed(package: str) -> bool:
    """Return whether a package's metadata are found."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    hidden = set(sys.argv[1].split(","))
    hide(hidden)
    assert not any(map(is_installed, hidden))
    print(json.dumps([run(arguments) for arguments in json.loads(sys.argv[2])]))
