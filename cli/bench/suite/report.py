"""The report of a suite: attempts, and the verdict of each scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specbuild.cli.bench.suite.scenarios import Thresholds
from specbuild.runtime.engine_dir.strict_json import FORMER_KEY

Verdict = Literal["passed", "missed", "skipped"]


@dataclass(frozen=True)
class Attempt:
    """One measurement: both ways of decoding, in direct succession.

    ``byte_floor_ratio`` is None without a floor; values of a draft are None without one.
    """

    tokens_per_s: float
    without_draft_tokens_per_s: float
    ttft_s: float
    over_no_draft: float | None
    tokens_per_step: float | None = field(metadata={FORMER_KEY: "tokens_a_step"})
    same_output: bool | None
    byte_floor_ratio: float | None = field(metadata={FORMER_KEY: "of_byte_floor"})


@dataclass(frozen=True)
class ScenarioReport:
    """A scenario; ``reasons`` explain why the last attempt missed, or why it was skipped.

    ``tokens_per_s`` is the median of the attempts, 0 if there was none. ``programs`` counts the
    launches of a CUDA engine by program, over all attempts.
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    tokens_per_s: float
    seconds: float
    programs: dict[str, int]


@dataclass(frozen=True)
class SuiteReport:
    """The output of ``bench suite --json``, which ``--record`` reads."""

    suite: str
    engine: str
    device: str
    scenarios: tuple[ScenarioReport, ...]

    @property
    def passed(self) -> bool:
        """Whether at least one scenario was measured, and none missed."""
        verdicts = [scenario.verdict for scenario in self.scenarios]
        return "missed" not in verdicts and "passed" in verdicts


def misses(attempt: Attempt, thresholds: Thresholds, record: float | None) -> tuple[str, ...]:
    """Return the thresholds that an attempt misses, in words. ``record`` is the stored rate."""
    measured: Mapping[str, float | None] = {
        "over_no_draft": attempt.over_no_draft,
        "tokens_per_step": attempt.tokens_per_step,
        "byte_floor_ratio": attempt.byte_floor_ratio,
        "over_record": None if record is None else attempt.tokens_per_s / record,
    }
    wrong = []
    for name, value in measured.items():
        minimum = getattr(thresholds, name)
        if minimum is None or (name == "over_record" and record is None):
            continue
        if value is None:
            wrong.append(f"{name}: this engine gives none")
        elif value < minimum:
            wrong.append(f"{name} is {value:.3f}, must be {minimum:g}")
    if thresholds.same_output and not attempt.same_output:
        wrong.append("the output differs from that without a draft")
    return tuple(wrong)
