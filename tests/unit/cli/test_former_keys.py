"""Version 0.2 reads suites and reports with the keys of version 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbuild.cli.bench.suite.scenarios import read_suite
from specbuild.cli.bench.suite.stored import read_report
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.engine_dir.strict_json import from_json, to_json
from specbuild.runtime.errors import SpecbuildError

SUITE = "suite: x\nscenarios: [{{name: a, context: 4, thresholds: {{{}: 1.5}}}}]"
ATTEMPT = {
    "tokens_per_s": 2.0, "without_draft_tokens_per_s": 1.0, "ttft_s": 0.1, "over_no_draft": 2.0,
    "same_output": True,
}  # fmt: skip


@pytest.mark.parametrize("former", [True, False])
def test_thresholds_of_a_suite(tmp_path: Path, former: bool) -> None:
    steps = "tokens_a_step" if former else "tokens_per_step"
    (tmp_path / "s.yaml").write_text(SUITE.format(steps))
    suite, _ = read_suite(str(tmp_path / "s.yaml"))
    assert suite.scenarios[0].thresholds.tokens_per_step == 1.5
    floor = "of_byte_floor" if former else "byte_floor_ratio"
    (tmp_path / "s.yaml").write_text(SUITE.format(floor))
    suite, _ = read_suite(str(tmp_path / "s.yaml"))
    assert suite.scenarios[0].thresholds.byte_floor_ratio == 1.5


def test_a_stored_report(tmp_path: Path) -> None:
    scenario = {
        "name": "a", "verdict": "passed", "reasons": [], "tokens_per_s": 2.0, "seconds": 1.0,
        "programs": {}, "attempts": [ATTEMPT | {"tokens_a_step": 1.25, "of_byte_floor": None}],
    }  # fmt: skip
    report = {"suite": "x", "engine": "e", "device": "cpu", "scenarios": [scenario]}
    (tmp_path / "r.json").write_text(json.dumps(report))
    (attempt,) = read_report(tmp_path / "r.json").scenarios[0].attempts
    assert (attempt.tokens_per_step, attempt.byte_floor_ratio) == (1.25, None)
    assert to_json(attempt)["tokens_per_step"] == 1.25
    scenario["attempts"] = [ATTEMPT | {"tokens_a_step": 1, "tokens_per_steps": 1}]
    (tmp_path / "r.json").write_text(json.dumps(report))
    with pytest.raises(SpecbuildError, match="unknown keys tokens_per_steps"):
        read_report(tmp_path / "r.json")


def test_a_plan_has_the_keys_of_its_format() -> None:
    entry = ProgramEntry(
        "step@1", "f", "step", 1, 1, 0, 0, 0, False, 1, changes_logits=True, host_proposal=True
    )
    stored = to_json(entry)
    assert stored["adjusts"] is True and stored["offered"] is True
    assert "host_proposal" not in stored and "changes_logits" not in stored
    assert from_json(ProgramEntry, stored, "p") == entry
