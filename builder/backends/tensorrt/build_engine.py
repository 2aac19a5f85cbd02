"""Builds an engine in a separate process, because the library can terminate its process.

The process reads the request as a line of JSON from standard input. The parent keeps that stream
open as long as it needs the result. The process writes lines of JSON to the original standard
output; the library's own output is redirected to standard error.
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
# The child uses the module search path of the parent.
_START = f"""import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import main
sys.exit(main())"""


def build_engine(request: EngineRequest, progress: Progress) -> EngineResult:
    """Build the file ``request.engine``. Raises SpecbuildError with the library's message."""
    progress.start(f"building {request.role}.engine", _PARTS, "step")
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # an early exit is reported by its exit code
            process.stdin.write(json.dumps(to_json(request)) + "\n")
            process.stdin.flush()
        result = _follow(process.stdout, progress)
        process.wait()
        stderr.seek(0)
        last_line = (stderr.read().strip().splitlines() or ["it printed nothing"])[-1]
    if result is None:
        raise SpecbuildError(
            f"the process that built {request.role}.engine exited with code "
            f"{process.returncode} ({last_line[:300]}): the library failed or memory was exhausted"
        )
    return result


def _follow(lines: IO[str], progress: Progress) -> EngineResult | None:
    """Report progress until the process ends; return None if it ended without a result."""
    done = 0
    for line in lines:
        message = json.loads(line)
        if "error" in message:
            raise SpecbuildError(message["error"])
        if "result" in message:
            return from_json(EngineResult, message["result"], "result")
        parts = int(message["done"] * _PARTS)
        if parts > done:
            progress.advance(parts - done)
            done = parts
    return None


def _end_with_parent() -> None:
    """End this process at the end of standard input, which follows the end of the parent."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> int:
    """Run the child process and return its exit code."""
    # The library prints to standard output, so the messages need a separate descriptor.
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: object) -> None:
        messages.write(json.dumps(message) + "\n")

    try:
        request = from_json(EngineRequest, json.loads(sys.stdin.readline()), "request")
        threading.Thread(target=_end_with_parent, daemon=True).start()
        result = EngineBuild(request, lambda fraction: send(done=fraction)).run()
    except SpecbuildError as error:
        send(error=str(error))
        return 2
    except OSError as error:
        path = error.filename or request.engine
        send(error=f"cannot write {path}: {error.strerror}; free disk space there")
        return 2
    send(result=to_json(result))
    return 0
