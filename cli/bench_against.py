"""What a draft's stored type costs in acceptance: two reports of the same prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.strict_json import from_json

if TYPE_CHECKING:
    from specbuild.cli.bench_measure import BenchReport


def read_report(file: Path) -> BenchReport:
    """What ``bench --json`` wrote. Raises SpecbuildError where the file holds something else."""
    from specbuild.cli.bench_measure import BenchReport

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecbuildError(
            f"--against {file} cannot be read as a report ({error}); give the file that "
            "bench --json of the other engine wrote"
        ) from error
    return from_json(BenchReport, data, str(file))


def against(report: BenchReport, other: BenchReport) -> BenchReport:
    """The report with the acceptance of ``other`` beside its own.

    Raises SpecbuildError where the two decoded other prompts, or more tokens.
    """
    mine, theirs = _measured(report), _measured(other)
    if mine != theirs:
        raise SpecbuildError(
            f"--against: the other report is of {theirs}, this one of {mine}: measure both with "
            "the same prompts and tokens (and draft options)"
        )
    compared = [
        replace(entry, acceptance_length_against=known.mean_acceptance_length)
        for entry, known in zip(report.sets, other.sets, strict=True)
    ]
    return replace(report, sets=tuple(compared), against_dtype=other.draft_dtype)


def _measured(report: BenchReport) -> tuple[object, ...]:
    sets = [(entry.name, sorted({pair.id for pair in entry.pairs})) for entry in report.sets]
    return report.max_new_tokens, sets
