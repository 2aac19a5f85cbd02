"""Print which ops, phases, drafters and backends have tests. Runs no test.

    python tests/claims.py [--root DIRECTORY]

A claim is a test function for one op and phase, or for one kind of drafter and backend. Compare the
lists before and after a change of tests; benchmarks/results has such a record.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

KINDS = ("eagle3", "p-eagle", "dflash", "jetspec", "mtp", "suffix")
# The backend of tests whose module is about a drafter, by a part of the module's path.
BACKENDS = (
    ("gpu/", "GPU"), ("contract_cuda", "plan"), ("cuda_", "plan"), ("e2e/", "CPU"), ("", "-"),
)  # fmt: skip
DRAFTER_MODULES = re.compile(
    r"drafter_contract|dflash|p_eagle|mtp|suffix|draft_models|one_pass|cuda_interpreted"
    r"|cuda_interpreter|synth_drafts|draft_limits|unit/builder/test_synth\.py"
)


def op_claims(item: pytest.Function) -> Iterator[tuple[str, ...]]:
    """Return the claims of a test in ``tests/ops``. By default the op is named by the module."""
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    op = getattr(given.get("op"), "name", item.path.stem.removeprefix("test_"))
    for phase in given.get("phases") or [given.get("phase", "-")]:
        yield str(op), str(phase), item.originalname.removeprefix("test_")


def drafter_claims(item: pytest.Function) -> Iterator[tuple[str, ...]]:
    """Return the claims of a test whose module tests drafters."""
    name = item.originalname.removeprefix("test_")
    module = item.path.as_posix()
    case = item.callspec.id.replace("_", "-") if hasattr(item, "callspec") else ""
    text = case + " " + item.path.stem.replace("_", "-") + " " + name.replace("_", "-")
    kinds = [kind for kind in KINDS if kind in text] or ["eagle3"]
    backend = next(backend for part, backend in BACKENDS if part in module)
    for kind in kinds:
        yield kind, backend, name


class Collector:
    """A pytest plugin that collects the claims of all tests."""

    def __init__(self) -> None:
        self.ops: set[tuple[str, ...]] = set()
        self.drafters: set[tuple[str, ...]] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """See pytest's hook of this name."""
        for item in items:
            if not isinstance(item, pytest.Function):
                continue
            if "/tests/ops/" in item.path.as_posix():
                self.ops.update(op_claims(item))
            elif DRAFTER_MODULES.search(item.path.as_posix()):
                self.drafters.update(drafter_claims(item))


def main() -> int:
    """Print both tables and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    root = parser.parse_args().root
    claims, log = Collector(), io.StringIO()
    arguments = ["--collect-only", "-q", "--rootdir", str(root), "-c", str(root / "pyproject.toml")]
    with redirect_stdout(log):
        code = pytest.main([*arguments, str(root / "tests")], plugins=[claims])
    if code:
        print(log.getvalue()[-3000:], file=sys.stderr)
    for title, found in (("op | phase", claims.ops), ("drafter | backend", claims.drafters)):
        print(f"{title} | property: {len(found)}")
        for claim in sorted(found):
            print(" | ".join(claim))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
