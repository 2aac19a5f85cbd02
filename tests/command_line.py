"""The results of command lines that tests run in their own process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """The exit code, standard output and standard error of a command line."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, *parts: str) -> bool:
        """Return whether exit code is 2, output is empty, and one sentence has every part.

        Progress lines may precede the sentence.
        """
        *progress, sentence = self.err.splitlines()
        assert self.code == 2, self
        assert sentence.startswith("specbuild: "), self
        assert not any(line.startswith("specbuild: ") for line in progress), self
        assert not self.out, self
        assert "Traceback" not in self.err
        assert all(part in sentence for part in parts), self.err
        return True


Command = Callable[..., Result]


@contextmanager
def serving(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the address that a ``specbuild serve`` process prints, then stop the process."""
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        while "serving" not in line:
            assert line, process.wait()
            line = process.stderr.readline()
        yield line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
