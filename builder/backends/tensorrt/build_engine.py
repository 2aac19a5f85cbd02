"""Builds an engine in a process of its own: the library may end the process that it runs in.

The process gets the request as a line of JSON on standard input, which stays open as long as it is
wanted. It writes lines of JSON to the standard output that it was started with; the library's own
output goes to the standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import IO

from specbuild.builder.backends.tensorrt.network import EngineBuild
from specbuild.builder.backends.tensorrt.request import EngineRequest, EngineResult
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.strict_json import from_json, to_json
from specbuild.runtime.errors import SpecbuildError

_PARTS = 100
# What this process finds, the other must find too.
_START = f"""import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import main
sys.exit(main())"""


def build_engine(request: EngineRequest, progress: Progress) -> EngineResult:
    """Builds the file ``request.engine``. Raises SpecbuildError with what the library says."""
    progress.start(f"building {request.role}.engine", _PARTS, "step")
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # where it ended early, its exit code tells
            process.stdin.write(json.dumps(to_json(request)) + "\n")
            process.stdin.flush()
        answer = _follow(process.stdout, progress)
        process.wait()
        said.seek(0)
        last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
    if answer is None:
        raise SpecbuildError(
            f"the process that built {request.role}.engine ended with {process.returncode} "
            f"({last[:300]}); the library failed, or memory ran out"
        )
    return answer


def _follow(lines: IO[str], progress: Progress) -> EngineResult | None:
    """Reports the progress until the process is through; None where it ended without an answer."""
    done = 0
    for line in lines:
        event = json.loads(line)
        if "error" in event:
            raise SpecbuildError(event["error"])
        if "result" in event:
            return from_json(EngineResult, event["result"], "result")
        parts = int(event["done"] * _PARTS)
        if parts > done:
            progress.advance(parts - done)
            done = parts
    return None


def _end_with_parent() -> None:
    """Standard input ends when the process that asked does, however that came about."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> int:
    """What the other process does; its exit code."""
    # The library prints to standard output; the answers must stay apart from that.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**event: object) -> None:
        answers.write(json.dumps(event) + "\n")

    try:
        request = from_json(EngineRequest, json.loads(sys.stdin.readline()), "request")
        threading.Thread(target=_end_with_parent, daemon=True).start()
        result = EngineBuild(request, lambda fraction: tell(done=fraction)).run()
    except SpecbuildError as error:
        tell(error=str(error))
        return 2
    except OSError as error:
        tell(error=f"{error.filename or request.engine}: {error.strerror}; free some space there")
        return 2
    tell(result=to_json(result))
    return 0
