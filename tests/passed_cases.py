"""Emulated cases that have passed before, so that `make test` need not run them again.

A case is a test of tests/ops that launches kernels in the emulator. Its digest covers the test's
module and everything it imports (cases, references, lowerings, the emulation), the libraries, and
every kernel that it launched with headers, constants, emulator and compiler. The store keeps the
digests of passed cases. A case runs if its digest is not stored, without :data:`SKIP`, or with
``CI``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from content_store import content_store, digest
from source_tree import SourceTree, source_tree, versions

from specbuild.plugins_cuda.launches import Kernel
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError

# Set by `make test`.
SKIP = "SPECBUILD_SKIP_UNCHANGED"
REASON = "unchanged since it passed"
FOLDER = Path(__file__).parent / "ops"
EMULATION = FOLDER / "emulation.py"


def skips_unchanged(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this run skips cases that have passed."""
    return bool(environment.get(SKIP)) and environment.get("CI", "") in ("", "0", "false")


def is_case(item: pytest.Item) -> bool:
    """Return whether the digest covers all that a test depends on, and it may launch kernels.

    Hypothesis draws other examples in each run. Shared fixtures are not covered.
    """
    if not isinstance(item, pytest.Function) or FOLDER not in item.path.parents:
        return False
    if getattr(item.obj, "is_hypothesis_test", False):
        return False
    own = {"made_once_in_a_run"} | {
        name
        for name, definitions in item._fixtureinfo.name2fixturedefs.items()
        if definitions[-1].func.__module__.startswith(("_pytest.", item.module.__name__))
    }
    return item._fixtureinfo.name2fixturedefs.keys() <= own and EMULATION in module_sources(
        source_tree(), item.path, None
    )


@cache
def module_sources(tree: SourceTree, module: Path, op_folder: str | None) -> frozenset[Path]:
    """Return the files that a test depends on, for all ops or for one op and its imports."""
    return tree.closure([module], None if op_folder is None else (op_folder,))


@cache
def code_digest(tree: SourceTree, module: Path, op_folder: str | None) -> str:
    """Return a digest that changes with any of these files and with the libraries."""
    return digest(tree.digest(module_sources(tree, module, op_folder)), versions())


def _op_folder(item: pytest.Function) -> str | None:
    """Return the folder of the op in a test's parameters."""
    op = item.callspec.params.get("op") if hasattr(item, "callspec") else None
    return op.reference.__module__.split(".")[-2] if isinstance(op, OpSpec) else None


def _case_key(item: pytest.Function) -> str:
    return digest(item.nodeid, code_digest(source_tree(), item.path, _op_folder(item)))


@cache
def _kernel_key(kernel: Kernel) -> str:
    from emulation import kernel_key

    return kernel_key(kernel)


def _pass_key(case: str, kernels: Iterable[Kernel]) -> str:
    return digest(case, *sorted(_kernel_key(kernel) for kernel in kernels))


def has_passed(case: str) -> bool:
    """Return whether this case has passed with its kernels as they are now."""
    launches = content_store().find("launches", case)
    if launches is None:
        return False
    kernels = [
        Kernel(folder, entry, tuple((name, value) for name, value in constants), file)
        for folder, entry, constants, file in json.loads((launches / "kernels.json").read_text())
    ]
    try:
        return content_store().find("passes", _pass_key(case, kernels)) is not None
    except SpecbuildError:  # a source is gone
        return False


def record_pass(case: str, kernels: Iterable[Kernel]) -> None:
    """Store that this case passed and launched these kernels."""
    kernels = sorted(kernels, key=repr)
    listed = json.dumps([(k.folder, k.entry, k.constants, k.file) for k in kernels])
    store = content_store()
    store.made("launches", case, lambda entry: (entry / "kernels.json").write_text(listed))
    store.made("passes", _pass_key(case, kernels), lambda _: None)


class PassedCases:
    """The hooks of a run: skip passed cases and record cases that pass."""

    def __init__(self) -> None:
        self._skips = skips_unchanged()
        self._module: Path | None = None
        self._launched: set[Kernel] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip an unchanged case before its fixtures are made."""
        if not is_case(item):
            return
        if item.path != self._module:
            self._module, self._launched = item.path, set()
        _launched_kernels().clear()
        if self._skips and has_passed(_case_key(item)):
            pytest.skip(REASON)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
        """Record a case that passes.

        A case without an op may depend on values that other cases of its module cached.
        """
        result = yield
        if is_case(item):
            own = set(_launched_kernels())
            self._launched |= own
            kernels = self._launched if _op_folder(item) is None else own
            if kernels:
                record_pass(_case_key(item), kernels)
        return result


def _launched_kernels() -> set[Kernel]:
    from emulation import LAUNCHED

    return LAUNCHED


def summary(skipped: Iterable[Any]) -> str | None:
    """Return a line about the cases among the skipped tests' reports."""
    count = sum(REASON in str(report.longrepr) for report in skipped)
    return f"{count} emulated cases {REASON}; `make test-all` runs them" if count else None
