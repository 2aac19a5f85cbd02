"""What a process costs, against another in turn: a slow or busy machine slows both."""

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
    """Seconds on a processor, user's and system's: a command's, and those of a process that only
    imports :data:`LIBRARIES`. A neighbour that takes turns on the same core adds to neither."""

    command_s: float
    libraries_s: float

    @property
    def ratio(self) -> float:
        """How many times the libraries' seconds the command took."""
        return self.command_s / self.libraries_s


def least_cost(
    command: Sequence[str], *, runs: int = 5, environment: Mapping[str, str] | None = None
) -> Cost:
    """The fewest seconds of each in so many runs in turn, after one of the command that does not
    count: it may compile or measure what stays. Bytecode is kept, as it is for users."""
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
