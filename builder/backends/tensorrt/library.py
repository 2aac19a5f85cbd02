"""Imports TensorRT or TensorRT-RTX for the builder; no other module of the builder imports them.

Both libraries have the same API. :data:`OFFERS` lists their differences.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES, library_reason


@dataclass(frozen=True)
class Offers:
    """The optional features of a library.

    ``capabilities`` lists the GPUs for which the library can build without such a GPU present. None
    means that it builds only for the installed GPU.
    """

    plugins: bool
    timing_cache: bool
    version_compatible: bool
    hardware_compatible: bool
    capabilities: tuple[str, ...] | None


# TensorRT-RTX compiles kernels when an engine is loaded, so its timing cache has no effect. It does
# not ship the lean runtime of version-compatible engines. Version 1.7.1 needs a GPU to build
# refittable and stripped engines. It lacks hardware compatibility, so engines list their GPUs.
OFFERS = {
    "tensorrt": Offers(True, True, True, True, None),
    "tensorrt-rtx": Offers(
        False,
        False,
        False,
        False,
        ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121"),
    ),
}


def require_library(backend: str) -> None:
    """Raise SpecbuildError if the library is missing or too old, without importing it."""
    reason = library_reason(backend)
    if reason is not None:
        raise SpecbuildError(f"--backend {backend}: {reason}")


def load(backend: str) -> Any:
    """Return the library's Python module. Raises SpecbuildError if it is missing or broken."""
    require_library(backend)
    try:
        return importlib.import_module(LIBRARIES[backend].module)
    except (ImportError, OSError, RuntimeError) as error:  # a shared library is missing or broken
        title = LIBRARIES[backend].title
        raise SpecbuildError(
            f"--backend {backend}: {title} cannot be loaded ({error}); {LIBRARIES[backend].install}"
        ) from error


def new_logger(library: Any, log: Callable[[str], None]) -> Any:
    """Return a logger that passes the library's error messages to ``log``."""

    class ErrorLogger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
                log(message)

    return ErrorLogger()


def new_monitor(library: Any, advance: Callable[[float], None]) -> Any:
    """Return a progress monitor that reports the finished fraction of the build, from 0 to 1."""
    phases = Phases(advance)

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            phases.start(phase, parent, steps)

        def step_complete(self, phase: str, _step: int) -> bool:
            phases.step(phase)
            return True

        def phase_finish(self, phase: str) -> None:
            phases.finish(phase)

    return Monitor()


class Phases:
    """Combines nested phases of a build into one increasing fraction.

    A phase fills one step of its parent.
    """

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance
        self._open: dict[str, tuple[str | None, int, int]] = {}
        self._reported = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Start a phase with this number of steps."""
        self._open[phase] = (parent, max(steps, 1), 0)

    def step(self, phase: str) -> None:
        """Count one finished step of a phase."""
        if phase in self._open:
            parent, steps, done = self._open[phase]
            self._open[phase] = (parent, steps, min(done + 1, steps))
            self._report()

    def finish(self, phase: str) -> None:
        """Remove a finished phase."""
        self._open.pop(phase, None)

    def _report(self) -> None:
        root = next((name for name, (parent, *_) in self._open.items() if parent is None), None)
        if root is None:
            return
        fraction = self._fraction(root)
        if fraction > self._reported:
            self._reported = fraction
            self._advance(fraction)

    def _fraction(self, phase: str) -> float:
        _, steps, done = self._open[phase]
        inner = [self._fraction(name) for name, (p, *_) in self._open.items() if p == phase]
        return min((done + max(inner, default=0.0)) / steps, 1.0)
