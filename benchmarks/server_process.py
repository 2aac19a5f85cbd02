"""``specbuild serve`` as a separate process, for scripts that send requests over loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server_process(engine: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process, on a free port, and the URL that it prints; it ends with the context.

    Raises SystemExit if it ends before it serves.
    """
    command = [sys.executable, "-m", "specbuild.cli.main", "serve", str(engine), "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while "serving" not in (line := process.stderr.readline()):
            if not line:
                raise SystemExit(f"the server ended with {process.wait()}")
        yield process, line.split()[-1]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
