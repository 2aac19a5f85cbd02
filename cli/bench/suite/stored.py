"""Reports of earlier suites, as references for later ones and for ``tune``."""

from __future__ import annotations

from pathlib import Path

from specbuild.cli.bench.suite.report import SuiteReport
from specbuild.runtime.engine_dir.strict_json import from_json, parsed
from specbuild.runtime.errors import SpecbuildError


def read_report(file: Path) -> SuiteReport:
    """Return the output of ``bench suite --json``. SpecbuildError if the file is another."""
    try:
        data = parsed(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecbuildError(
            f"{file} cannot be read as a suite's report ({error}); give what bench suite --json "
            "wrote"
        ) from error
    return from_json(SuiteReport, data, str(file))


def stored_speeds(file: Path | None) -> dict[str, float]:
    """Return the tokens per second of measured scenarios, by name."""
    if file is None:
        return {}
    measured = (s for s in read_report(file).scenarios if s.attempts)
    return {scenario.name: scenario.tokens_per_s for scenario in measured}


def programs_of(file: Path) -> frozenset[str]:
    """Return the programs that a suite's scenarios ran; SpecbuildError if there are none."""
    names = frozenset(name for s in read_report(file).scenarios for name in s.programs)
    if not names:
        raise SpecbuildError(f"{file} counts no programs: it is of an engine that has none")
    return names
