"""Compare the processor time of two processes that run alternately on the same machine.

A slow or busy machine slows both.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIBRARIES = "numpy, onnxruntime, tokenizers, jinja2, typer, rich"


@dataclass(frozen=True)
class Cost:
    """Processor seconds (user and system) of a command, and of importing :data:`LIBRARIES`.

    Another process on the same core adds to neither.
    """

    command_s: float
    libraries_s: float

    @property
    def ratio(self) -> float:
        """The command's seconds divided by those of the libraries."""
        return self.command_s / self.libraries_s


def least_cost(
    command: Sequence[str], *, runs: int = 5, environment: Mapping[str, str] | None = None
) -> Cost:
    """Return the fewest seconds of each in ``runs`` alternating runs.

    An additional first run of the command may compile or measure what is stored. Bytecode is kept,
    as it is for users.
    """
    given = os.environ if environment is None else environment
    environment = {name: given[name] for name in given if name != "PYTHONDONTWRITEBYTECODE"}
    yardstick = [sys.executable, "-c", f"import {LIBRARIES}"]
    _cpu_s(command, environment)
    times = [(_cpu_s(command, environment), _cpu_s(yardstick, environment)) for _ in range(runs)]
    ours, theirs = zip(*times, strict=True)
    return Cost(min(ours), min(theirs))


def _cpu_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
