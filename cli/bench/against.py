"""Compares the acceptance of two storage types of a draft: two reports of the same prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.cli.options.draft_choice import describe_shape
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.cli.bench.pairs import BenchReport


def read_report(file: Path) -> BenchReport:
    """Return what ``bench pairs --json`` wrote. Raises SpecbuildError for any other file."""
    from specbuild.cli.bench.pairs import BenchReport

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecbuildError(
            f"--against {file} cannot be read as a report ({error}); give the file that "
            "bench pairs --json of the other engine wrote"
        ) from error
    return from_json(BenchReport, data, str(file))


def against(report: BenchReport, other: BenchReport) -> BenchReport:
    """Return the report with the acceptance of ``other`` in addition.

    Raises SpecbuildError if the two have different prompts, numbers of tokens, or drafts.
    """
    for what, other_value, own_value in (
        ("outputs", f"{other.max_new_tokens} tokens", f"{report.max_new_tokens} tokens"),
        ("drafts", _draft(other), _draft(report)),
        ("prompt sets", _names(other), _names(report)),
        ("prompts", _prompts(other), _prompts(report)),
    ):
        if own_value != other_value:
            differ = "" if what == "prompts" else f" ({other_value} there, {own_value} here)"
            raise SpecbuildError(
                f"--against: the other report is of other {what}{differ}; measure both with the "
                "same prompts, --max-new-tokens and draft options"
            )
    compared = [
        replace(entry, acceptance_length_against=other_set.mean_acceptance_length)
        for entry, other_set in zip(report.sets, other.sets, strict=True)
    ]
    return replace(report, sets=tuple(compared), against_dtype=other.draft_dtype)


def _draft(report: BenchReport) -> str:
    return "no fixed one" if report.shape is None else describe_shape(report.shape)


def _names(report: BenchReport) -> str:
    return ", ".join(entry.name for entry in report.sets)


def _prompts(report: BenchReport) -> str:
    return json.dumps([sorted({p.prompt_digest for p in entry.pairs}) for entry in report.sets])
