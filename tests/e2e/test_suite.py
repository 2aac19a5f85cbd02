"""``bench suite``: scenarios on a tiny engine, judged, and compared with stored results."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import Command

from specbuild.cli.bench.suite.report import Attempt, misses
from specbuild.cli.bench.suite.scenarios import Thresholds, read_suite, shipped_suites
from specbuild.runtime.errors import SpecbuildError

SUITE = """
suite: mine
scenarios:
  - name: holds
    context: 12
    output_tokens: 8
    passes: 2
    attempts: 3
    thresholds: {tokens_per_step: 1.0, over_record: 0.0001}
  - name: cannot hold
    context: 12
    output_tokens: 8
    batch: 2
    draft: 1x1x1
    passes: 1
    attempts: 2
    thresholds: {over_no_draft: 1000, tokens_per_step: 3}
  - name: too long
    context: 4000
    thresholds: {}
"""


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    """A suite of three scenarios: one meets its thresholds, one does not, one cannot run."""
    file = tmp_path / "suite.yaml"
    file.write_text(SUITE)
    return file


def test_a_suite_is_judged_and_stored(
    command: Command, tiny_engine: Path, suite_file: Path, tmp_path: Path
) -> None:
    junit = tmp_path / "junit.xml"
    result = command("bench", "suite", tiny_engine, suite_file, "--junit", junit, "--json")
    assert result.code == 1, result.err
    (report,) = result.records
    holds, missed, skipped = report["scenarios"]
    assert (holds["verdict"], missed["verdict"], skipped["verdict"]) == (
        "passed", "missed", "skipped",
    )  # fmt: skip
    assert len(holds["attempts"]) == 2 and len(missed["attempts"]) == 2
    assert "over_no_draft" in missed["reasons"][0]
    assert "the engine takes 96" in skipped["reasons"][0]
    root = ElementTree.parse(junit).getroot()
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("3", "1", "1")
    failed = root.findall("testcase")[1].find("failure")
    assert failed is not None and "over_no_draft" in failed.get("message", "")

    record = tmp_path / "record.json"
    report["scenarios"][0]["tokens_per_s"] *= 1e12
    record.write_text(json.dumps(report))
    result = command("bench", "suite", tiny_engine, suite_file, "--record", record, "--json")
    (again,) = result.records
    assert again["scenarios"][0]["verdict"] == "missed"
    assert "over_record" in again["scenarios"][0]["reasons"][0]


def test_smoke_passes(command: Command, tiny_engine: Path) -> None:
    result = command("bench", "suite", tiny_engine, "smoke")
    assert result.code == 0, result.out + result.err
    assert result.out.count("passed") == 2


def test_a_suite_with_a_skipped_scenario_does_not_pass(command: Command, ids_engine: Path) -> None:
    result = command("bench", "suite", ids_engine, "smoke", "--json")
    assert result.code == 1
    assert {s["verdict"] for s in result.records[0]["scenarios"]} == {"skipped"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("suite: x\nscenario: []", "did you mean scenarios?"),
        ("suite: x\nscenarios: []", "needs scenarios"),
        ("- 1", "keys and values"),
        ("a: [", "cannot be read as YAML"),
        ("suite: x\nscenarios: [{name: a, context: 0, thresholds: {}}]", "at least 1"),
        ("suite: x\nscenarios: [{name: a, context: 4, thresholds: {}, passes: 9}]", "cannot pass"),
        ("suite: x\nscenarios: [{name: a, context: 4, thresholds: {}, draft: 3}]", "expected str"),
        ("suite: x\nscenarios: [{name: a, context: 4, thresholds: {}, draft: b}]", "1x3x3"),
        ("suite: x\nscenarios: [{name: a, context: 4, thresholds: {fast: 1}}]", "fast"),
    ],
)
def test_reports_an_invalid_suite_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    with pytest.raises(SpecbuildError, match=words):
        read_suite(str(file))


def test_rejects_contradicting_options(
    command: Command, tiny_engine: Path, suite_file: Path, tmp_path: Path
) -> None:
    for arguments, words in (
        (("none-such",), "smoke"),
        ((suite_file, "--no-spec"), "No such option"),
        ((suite_file, "--record", suite_file), "cannot be read"),
    ):
        result = command("bench", "suite", tiny_engine, *arguments)
        assert result.code == 2 and words in result.err, result.err


def test_shipped_suites_are_valid() -> None:
    assert shipped_suites() == ["large-context-16k-x4", "single-32k", "smoke"]
    for name in shipped_suites():
        assert read_suite(name)[0].suite == name


def test_a_threshold_without_a_measurement_is_not_met() -> None:
    attempt = Attempt(10.0, 5.0, 0.1, 2.0, 3.0, True, None)
    assert misses(attempt, Thresholds(over_no_draft=2.0, same_output=True), None) == ()
    assert misses(attempt, Thresholds(byte_floor_ratio=0.1), None) == (
        "byte_floor_ratio: this engine gives none",
    )
    assert misses(attempt, Thresholds(over_record=0.97), 10.5) == (
        "over_record is 0.952, must be 0.97",
    )
    assert misses(attempt, Thresholds(over_record=0.97), None) == ()
