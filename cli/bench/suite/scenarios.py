"""The scenarios and thresholds of a suite, as records of its YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.builder.yaml_file import read_yaml
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.strict_json import FORMER_KEY
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.runtime.decode.decoder import Speculation

_SHIPPED = Path(__file__).parent / "shipped"
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of a scenario; None and False have no effect.

    ``over_no_draft``: tokens per second relative to the same prompts without a draft, in direct
    succession. ``tokens_per_step``: accepted draft tokens and the target's own token.
    ``same_output``: the tokens equal those without a draft. ``byte_floor_ratio``: the time to read
    the bytes of a step without a draft on an idle GPU, divided by the time of the step (CUDA).
    ``over_record``: tokens per second relative to the stored report.
    """

    over_no_draft: float | None = None
    tokens_per_step: float | None = field(default=None, metadata={FORMER_KEY: "tokens_a_step"})
    same_output: bool = False
    byte_floor_ratio: float | None = field(default=None, metadata={FORMER_KEY: "of_byte_floor"})
    over_record: float | None = None


@dataclass(frozen=True)
class Scenario:
    """``batch`` prompts of ``context`` tokens, decoded in one batch.

    The prompts are those of ``prompts``, a file next to the suite's, used in turn and repeated up
    to ``context``; without it they are random tokens. ``draft`` is "default", "none", or a tree
    such as "1x3x3": top-k, depth, tokens. The scenario passes after ``passes`` consecutive passes,
    within ``attempts``.
    """

    name: str
    context: int
    thresholds: Thresholds
    batch: int = 1
    output_tokens: int = 128
    prompts: str | None = None
    draft: str = "default"
    passes: int = 3
    attempts: int = 5

    def __post_init__(self) -> None:
        minimums = {"context": 1, "batch": 1, "output_tokens": 2, "passes": 1}
        for name, value in minimums.items():
            if getattr(self, name) < value:
                raise SpecbuildError(f"scenario {self.name!r}: {name} must be at least {value}")
        if self.attempts < self.passes:
            raise SpecbuildError(
                f"scenario {self.name!r}: {self.attempts} attempts cannot pass {self.passes} times"
            )
        _ = self.speculation

    @property
    def speculation(self) -> Speculation:
        """Return the draft to decode with; SpecbuildError if it is invalid."""
        if self.draft == "default":
            return "default"
        if self.draft == "none":
            return None
        match = _SHAPE.fullmatch(self.draft)
        if match is None:
            raise SpecbuildError(
                f"scenario {self.name!r}: draft is {self.draft!r}, expected default, none, or "
                "top-k, depth and tokens as 1x3x3"
            )
        return DraftShape(*map(int, match.groups()))


@dataclass(frozen=True)
class Suite:
    """Scenarios in the order in which they run."""

    suite: str
    scenarios: tuple[Scenario, ...]


def shipped_suites() -> list[str]:
    """Return the names of the included suites."""
    return sorted(file.stem for file in _SHIPPED.glob("*.yaml"))


def read_suite(name_or_file: str) -> tuple[Suite, Path]:
    """Return an included suite, or one from a file, and the folder of its prompts.

    Raises SpecbuildError if it does not exist or is invalid.
    """
    file = Path(name_or_file)
    if name_or_file in shipped_suites():
        file = _SHIPPED / f"{name_or_file}.yaml"
    elif not file.is_file():
        raise SpecbuildError(
            f"{name_or_file}: neither a file nor one of {', '.join(shipped_suites())}"
        )
    suite = read_yaml(Suite, file)
    names = [scenario.name for scenario in suite.scenarios]
    if not names or len(set(names)) < len(names):
        raise SpecbuildError(f"{file}: needs scenarios with unique names")
    return suite, file.parent
