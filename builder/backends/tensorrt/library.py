"""The one place of the builder that imports TensorRT, or TensorRT-RTX in its place.

Both have one API; what only one of them offers is told by :data:`OFFERS`.
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
    """What a library can do beyond what both can.

    ``capabilities`` lists the GPUs that engines can be built for without one of them; None where
    they are built for the GPU at hand.
    """

    plugins: bool
    timing_cache: bool
    version_compatible: bool
    hardware_compatible: bool
    capabilities: tuple[str, ...] | None


# TensorRT-RTX compiles kernels when an engine is loaded: a timing cache is a no-op there, and the
# lean runtime of version-compatible engines is not shipped. Refittable and stripped engines take a
# GPU to build, and hardware compatibility is not implemented: GPUs are listed (trial with 1.7.1).
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
    """SpecbuildError where the library is missing or too old; imports nothing."""
    reason = library_reason(backend)
    if reason is not None:
        raise SpecbuildError(f"--backend {backend}: {reason}")


def load(backend: str) -> Any:
    """The library's Python module. Raises SpecbuildError as :func:`require_library` does."""
    require_library(backend)
    try:
        return importlib.import_module(LIBRARIES[backend].module)
    except (ImportError, OSError, RuntimeError) as error:  # a shared library is missing or broken
        title = LIBRARIES[backend].title
        raise SpecbuildError(
            f"--backend {backend}: {title} cannot be loaded ({error}); {LIBRARIES[backend].install}"
        ) from error


def new_logger(library: Any, log: Callable[[str], None]) -> Any:
    """A logger that hands over what the library reports as an error."""

    class ErrorLogger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
                log(message)

    return ErrorLogger()


def new_monitor(library: Any, advance: Callable[[float], None]) -> Any:
    """A progress monitor that tells the part of the build that is done, 0 to 1, rising."""
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
    """Nested phases of a build as one rising fraction: a phase fills one step of its parent."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance
        self._open: dict[str, tuple[str | None, int, int]] = {}
        self._told = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """A phase of so many steps begins."""
        self._open[phase] = (parent, max(steps, 1), 0)

    def step(self, phase: str) -> None:
        """One step of a phase is done."""
        if phase in self._open:
            parent, steps, done = self._open[phase]
            self._open[phase] = (parent, steps, min(done + 1, steps))
            self._tell()

    def finish(self, phase: str) -> None:
        """A phase is over."""
        self._open.pop(phase, None)

    def _tell(self) -> None:
        root = next((name for name, (parent, *_) in self._open.items() if parent is None), None)
        if root is None:
            return
        fraction = self._fraction(root)
        if fraction > self._told:
            self._told = fraction
            self._advance(fraction)

    def _fraction(self, phase: str) -> float:
        _, steps, done = self._open[phase]
        inner = [self._fraction(name) for name, (p, *_) in self._open.items() if p == phase]
        return min((done + max(inner, default=0.0)) / steps, 1.0)
