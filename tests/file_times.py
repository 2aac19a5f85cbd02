"""Measure the processor time of each test file, so that the longest files start first.

With `--dist loadfile` a worker runs one file after another, in the order of collection. If long
files start first, the workers end at about the same time. The store has the times of earlier runs.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from content_store import content_store

# The order for an empty store.
LONGEST = (
    "tests/ops/test_kernels.py",
    "tests/ops/test_attention_kernels.py",
    "tests/unit/builder/test_default_kernels.py",
)
_FILE = "file-times.json"
_INPUT = "file_times"
_BYTES_PER_SECOND = 20_000


def processor_s() -> float:
    """Return the user and system seconds of this process and its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def expected_s(file: str, times: Mapping[str, float], root: Path) -> float:
    """Return the expected seconds of a file: measured, or from a fixed list, or from its size."""
    if file in times:
        return times[file]
    if file in LONGEST:
        return 1000.0 - LONGEST.index(file)
    return (root / file).stat().st_size / _BYTES_PER_SECOND


class FileTimes:
    """The hooks of a run. Every process measures, the first one collects, all use one order."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._is_worker = hasattr(config, "workerinput")
        self._is_distributed = self._is_worker or config.getoption("dist", "no") != "no"
        self._known: dict[str, float] = (
            config.workerinput[_INPUT] if self._is_worker else _stored_times()
        )
        self._measured: defaultdict[str, float] = defaultdict(float)
        self._last = processor_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the times to a worker: all workers must collect in the same order."""
        node.workerinput[_INPUT] = self._known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort files by time, the longest first. Tests keep their order within a file."""
        if self._is_distributed:
            files = {file for file, _, _ in (item.location for item in items)}
            seconds = {file: expected_s(file, self._known, self._root) for file in files}
            items.sort(key=lambda item: (-seconds[item.location[0]], item.location[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        """Add the duration of the phase to the report."""
        report = yield
        now = processor_s()
        report.processor_s, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the phases of a file."""
        self._measured[report.location[0]] += getattr(report, "processor_s", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Store the longest time of each file, since skipped cases may run the next time."""
        if self._is_distributed and not self._is_worker:
            times = _stored_times()
            for file, seconds in self._measured.items():
                times[file] = max(round(seconds, 1), times.get(file, 0.0))
            times = {file: times[file] for file in sorted(times) if (self._root / file).is_file()}
            path = content_store().folder / _FILE
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(times, indent=0))
            unfinished.rename(path)


def _stored_times() -> dict[str, float]:
    try:
        times: dict[str, float] = json.loads((content_store().folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return times
