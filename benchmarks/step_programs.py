"""Reports the step programs of engines: their number, their contents, and the build time.

Engines are those of engine_matrix.py; with ``--exact`` they have a program for every combination of
step properties, as tests/exact_steps.py lists them. By default nothing is compiled, and no GPU is
needed. Each JSON line has programs by kind, launches, distinct kernels and the sources that NVRTC
compiles for them, megabytes of the programs' files, and CPU seconds, which a busy machine affects
less than wall seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from engine_matrix import NAMES, ROOT, commands

from specbuild.builder.backends.cuda import backend
from specbuild.builder.backends.cuda.compile.source import source_of
from specbuild.builder.backends.cuda.engine import CudaEngine, LoweredEngine
from specbuild.cli.main import main as specbuild

_EXAMPLES = """examples:
  python benchmarks/step_programs.py example-cuda-draft example-cuda-dsa-specpv
  python benchmarks/step_programs.py example-cuda-dsa-specpv --exact --compile
"""


class _EnoughError(Exception):
    """The programs are lowered, which is all that is needed."""


def main() -> None:
    """Print the results of each engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = [name for name in NAMES if "cuda" in name]
    parser.add_argument("engines", nargs="+", choices=cuda, metavar="ENGINE", help=", ".join(cuda))
    parser.add_argument("--exact", action="store_true", help="a program for every combination")
    parser.add_argument("--compile", action="store_true", help="and compile, write the engine")
    args = parser.parse_args()
    for name in args.engines:
        print(json.dumps(_measured(name, exact=args.exact, compiles=args.compile)), flush=True)


def _measured(name: str, *, exact: bool, compiles: bool) -> dict[str, object]:
    measured: dict[str, object] = {"engine": name, "exact": exact}

    def lower(*arguments: Any, **named: Any) -> LoweredEngine:
        lowered = _timed(measured, "lowering", lambda: created(*arguments, **named))
        kernels = lowered.writer.kernels
        measured.update(
            programs=dict(Counter(_kind(entry) for entry, _ in lowered.programs)),
            launches=sum(entry.launches for entry, _ in lowered.programs),
            kernels=len(kernels),
            sources=len({source_of(kernel) for kernel in kernels}),
        )
        if not compiles:
            raise _EnoughError
        return lowered

    def compile_all(*arguments: Any, **named: Any) -> CudaEngine:
        engine = _timed(measured, "compiling", lambda: compiled(*arguments, **named))
        files = {path: len(data) for path, data in engine.files.items()}
        programs = sum(size for path, size in files.items() if path.startswith("programs/"))
        measured.update(
            mb_programs=round(programs / 1e6, 1), mb=round(sum(files.values()) / 1e6, 1)
        )
        return engine

    created, compiled = backend.lower_engine, backend.compile_engine
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(backend, lower_engine=lower, compile_engine=compile_all),
    ):
        command = commands([name], Path(folder) / "checkpoints")[name]
        with contextlib.suppress(_EnoughError):
            _with_forms(exact, lambda: specbuild([*command, str(Path(folder) / "engine")]))
    return measured


def _kind(entry: Any) -> str:
    """Logit-processor steps are counted separately: engines with a lossy mode have none."""
    return "logit-processor step" if entry.changes_logits else entry.kind


def _timed(measured: dict[str, object], what: str, run: Callable[[], Any]) -> Any:
    """Add the wall and CPU seconds of a run."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = run()
    measured[f"{what}_s"] = round(time.perf_counter() - wall_s, 1)
    measured[f"{what}_cpu_s"] = round(time.process_time() - cpu_s, 1)
    return result


def _with_forms(exact: bool, run: Callable[[], Any]) -> None:
    if not exact:
        run()
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from exact_steps import STEP_FORMS, exact_forms

    with mock.patch(STEP_FORMS, exact_forms):
        run()


if __name__ == "__main__":
    main()
