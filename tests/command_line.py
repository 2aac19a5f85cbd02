"""What a command line left behind, for tests that run one in process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a command line left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, *parts: str) -> bool:
        """Whether this is exit code 2 and one sentence that holds every part, and no output.

        Progress may stand before the sentence.
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
    """The address that a process of ``specbuild serve`` says on standard error; ends it."""
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
