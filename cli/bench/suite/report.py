"""What a suite found: attempts, and whether each scenario holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specbuild.cli.bench.suite.scenarios import Thresholds
from specbuild.runtime.engine_dir.strict_json import FORMER_KEY

Verdict = Literal["passed", "missed", "skipped"]


@dataclass(frozen=True)
class Attempt:
    """One measurement: both ways of decoding, one right after the other.

    ``byte_floor_ratio`` None where there is no such floor; what concerns a draft None without one.
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
    """``reasons``: why it was missed, by the last attempt, or skipped.

    ``tokens_per_s`` is the median of the attempts, 0 where there was none. ``programs`` counts the
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
    """What ``bench suite --json`` prints, and ``--record`` reads."""

    suite: str
    engine: str
    device: str
    scenarios: tuple[ScenarioReport, ...]

    @property
    def passed(self) -> bool:
        """Whether something was measured, and nothing missed."""
        verdicts = [scenario.verdict for scenario in self.scenarios]
        return "missed" not in verdicts and "passed" in verdicts


def misses(found: Attempt, demanded: Thresholds, record: float | None) -> tuple[str, ...]:
    """What an attempt does not reach, in words. ``record`` is the stored tokens a second."""
    measured: Mapping[str, float | None] = {
        "over_no_draft": found.over_no_draft,
        "tokens_per_step": found.tokens_per_step,
        "byte_floor_ratio": found.byte_floor_ratio,
        "over_record": None if record is None else found.tokens_per_s / record,
    }
    wrong = []
    for name, value in measured.items():
        least = getattr(demanded, name)
        if least is None or (name == "over_record" and record is None):
            continue
        if value is None:
            wrong.append(f"{name}: this engine gives none")
        elif value < least:
            wrong.append(f"{name} is {value:.3f}, must be {least:g}")
    if demanded.same_output and not found.same_output:
        wrong.append("the output differs from that without a draft")
    return tuple(wrong)
