"""Lists the requests that ``compare_kernels.py`` lowers: of engines, tactics and op tests.

- ``engines``: every call of the CUDA engines of ``engine_matrix.py``, with the tactics of a build
- ``tactics``: every shape of the included tactic files, with its tactic and with the default
- ``cases``: the cases of the ops' tests, and every tactic with the last case that has it

Nothing is compiled, and no weight of an engine is read or created.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine_matrix import NAMES, commands

from specbuild.builder.backends.cuda import backend
from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.cuda.tactics.entry_request import entry_request
from specbuild.builder.backends.cuda.tactics.tactic_book import SHIPPED_FILES, SHIPPED_FOLDER
from specbuild.builder.backends.cuda.tactics.tactic_file import read_tactics
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.cli.main import main as specbuild
from specbuild.plugins_cuda.launches import LoweringRequest, Tactic, Unsupported
from specbuild.runtime.errors import SpecbuildError

GPU = "sm_90a"


@dataclass(frozen=True)
class OpRequest:
    """An op by name and its lowering request; ``by`` names the sources of the request."""

    op: str
    request: LoweringRequest
    by: str


class _LoweredError(Exception):
    """Ends a build before it compiles; the message of the command line is not read."""


def engine_requests(globs: Sequence[str] = ("*",)) -> Iterator[OpRequest]:
    """Yield requests of the matrix: every engine with kernels is built up to its compilation."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (n for n in NAMES if any(fnmatch(n, glob) for glob in globs)):
            created = commands([name], Path(folder) / "checkpoints")[name]
            if ("--backend", "cuda") in pairwise(created):
                print(name, file=sys.stderr, flush=True)
                yield from _of_engine(name, [*created, str(Path(folder) / name)])


def _of_engine(name: str, command: list[str]) -> Iterator[OpRequest]:
    result: list[OpRequest] = []

    def lowered_only(target: Any, tactics: Any, make: Callable[[CallLowering], object]) -> None:
        lowering = CallLowering(target, tactics)

        def listed(lowered: LoweredEngine, *_: object) -> None:
            choices = lowering.choices(program for _, program in lowered.programs)
            result.extend(OpRequest(c.op.name, c.request, name) for c in choices)
            raise _LoweredError

        with patch.object(backend, "compile_engine", listed):
            make(lowering)

    message = StringIO()
    with (
        patch.object(backend, "without_spills", lowered_only),
        redirect_stdout(message),
        redirect_stderr(message),
    ):
        specbuild(command)
    if not result:
        raise SystemExit(f"{name} was not lowered: {message.getvalue()[-2000:]}")
    yield from result


def tactic_requests() -> Iterator[OpRequest]:
    """Yield requests of the included tactic files."""
    for gpu, name in SHIPPED_FILES.items():
        for entry in read_tactics(SHIPPED_FOLDER / name).entries:
            for each in dict.fromkeys((json.dumps(entry.tactic), "{}")):
                of_tactic = replace(entry, tactic=json.loads(each))
                request = entry_request(of_tactic, target_of(gpu))
                if isinstance(request, Unsupported):
                    print(f"left out: {entry.key}: {request.reason}", file=sys.stderr)
                else:
                    yield OpRequest(entry.op, request, name)


def case_requests() -> Iterator[OpRequest]:
    """Yield requests of the ops' tests, except for sizes that only a GPU computes."""
    target = target_of(GPU)
    for op in kernel_ops():
        for phase in phases_of(op):
            by_tactic: dict[str, tuple[LoweringRequest, Tactic]] = {}
            for case in cases_for(op, phase, gpu=False):
                request = kernel_case(op, case).request(phase, target)
                yield OpRequest(op.name, request, case.name)
                try:
                    tactics = () if op.tactics is None else op.tactics(request)
                except SpecbuildError:  # a case that its kernels refuse
                    continue
                by_tactic |= {repr(tactic): (request, tactic) for tactic in tactics}
            for request, tactic in by_tactic.values():
                yield OpRequest(op.name, replace(request, tactic=tactic), "every tactic")


def described(args: OpRequest) -> dict[str, Any]:
    """Return a request as JSON, without its sources."""
    request = args.request
    return {
        "op": args.op,
        "phase": request.phase,
        "uneven": request.uneven,
        "tactic": dict(request.tactic),
        "attributes": dict(request.attributes),
        "tensors": {n: [i.dtype, list(i.shape)] for n, i in sorted(request.tensors.items())},
        "target": vars(request.target),
    }


def main() -> int:
    """Write the requests, each once, with the names of all sources."""
    sources: dict[str, Callable[[], Iterator[OpRequest]]] = {
        "engines": lambda: engine_requests(args.engines),
        "tactics": tactic_requests,
        "cases": case_requests,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("--of", nargs="+", choices=sources, default=list(sources))
    parser.add_argument(
        "--engines", metavar="GLOB", nargs="+", default=["*"], help="by their names"
    )
    args = parser.parse_args()
    result: dict[str, set[str]] = {}
    for source in args.of:
        for each in sources[source]():
            result.setdefault(json.dumps(described(each), sort_keys=True), set()).add(
                f"{source}: {each.by}"
            )
    listed = [json.loads(key) | {"by": sorted(by)} for key, by in sorted(result.items())]
    args.output.write_text("[\n" + ",\n".join(map(json.dumps, listed)) + "\n]\n")
    print(f"{len(listed)} requests of {', '.join(args.of)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
