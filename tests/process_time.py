"""What a process costs: its own seconds on a processor, which a busy machine does not add to."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Sequence


def least_cpu_s(command: Sequence[str], *, runs: int = 7) -> float:
    """The fewest seconds, user's and system's, that a command took in so many runs."""
    return min(_cpu_s(command) for _ in range(runs))


def _cpu_s(command: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
