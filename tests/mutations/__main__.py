"""Apply each fault to a scratch copy of the sources and run the tests that must detect it.

    PYTHONPATH=tests python -m mutations [--only TEXT] [--budget SECONDS]

Exit code 1 if a fault is undetected or was not tried within the budget, or if the tests fail
without a fault.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from content_store import ROOT, content_store

from mutations.faults import MUTATIONS, Mutation

TREES = ("builder", "cli", "plugins_cuda", "runtime", "tests", "examples", "benchmarks")
PACKAGES = ("builder", "cli", "plugins_cuda", "runtime")
# Libraries that take longer to import than most tests take; none of them starts a thread.
_LIBRARIES = (
    "hypothesis",
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "torch",
    "torch.onnx._internal.exporter._core",
)
# Wall-clock time; a fault that makes a test hang counts as detected.
_LONGEST_S = 600


def copied(scratch: Path) -> None:
    """Copy the sources, and link them as an installed specbuild."""
    unwanted = shutil.ignore_patterns("__pycache__", "results")
    for name in TREES:
        shutil.copytree(ROOT / name, scratch / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", scratch)
    package = scratch / "out" / "types" / "specbuild"
    package.mkdir(parents=True)
    for name in PACKAGES:
        (package / name).symlink_to(scratch / name)
    for file in (scratch / "cli" / "specbuild").iterdir():
        (package / file.name).symlink_to(file)


def result(tests: Iterable[str], scratch: Path) -> int:
    """Return pytest's exit code for these tests in the copy, in a separate process."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(_tested(list(tests), scratch))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, 1, -signal.SIGALRM, -signal.SIGSEGV, -signal.SIGABRT):
        print((scratch / "log").read_text()[-2000:])
        raise RuntimeError(f"pytest ended with {status} over {tests}")
    return status


def _tested(tests: list[str], scratch: Path) -> int:
    os.chdir(scratch)
    ours = {str(ROOT), str(ROOT / "tests")}
    sys.path[:] = [
        str(scratch / "out" / "types"),
        str(scratch / "tests"),
        *(place for place in sys.path if place and os.path.realpath(place) not in ours),
    ]
    sys.dont_write_bytecode = True
    signal.alarm(_LONGEST_S)
    with (scratch / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]))


def detected(mutation: Mutation, scratch: Path) -> bool:
    """Return whether the named tests fail with the fault; restore the copy afterwards."""
    file = scratch / mutation.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutation.applied(scratch), encoding="utf-8")
    try:
        return result(mutation.tests, scratch) != 0
    finally:
        file.write_text(before, encoding="utf-8")


def main() -> int:
    """Report each fault; return 0 if all were detected and all tests pass without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose file or text has this")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in f"{m.file}: {m.text}"]
    deadline, count = time.monotonic() + arguments.budget, 0
    # Unchanged kernels come from the store of this checkout, since keys depend on content.
    content_store()
    for library in _LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        scratch = Path(folder)
        copied(scratch)
        for mutation in chosen:
            if time.monotonic() > deadline:
                print(f"the budget of {arguments.budget:.0f} s is spent")
                break
            found = detected(mutation, scratch)
            count += found
            state = "detected" if found else "UNDETECTED"
            print(f"{state}: {mutation.file}: {mutation.text!r}", flush=True)
        failing = 0
        for tests in dict.fromkeys(mutation.tests for mutation in chosen):
            if time.monotonic() < deadline and result(tests, scratch) != 0:
                print(f"without a fault these fail: {' '.join(tests)}")
                failing += 1
    print(f"{count} of {len(chosen)} faults were detected")
    return int(count < len(chosen) or failing > 0)


if __name__ == "__main__":
    sys.exit(main())
