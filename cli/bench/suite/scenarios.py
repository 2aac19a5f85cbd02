"""What a suite measures and demands: its YAML file as records."""

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
    """What a scenario must reach; None and False demand nothing.

    ``over_no_draft``: tokens a second over those of the same prompts without a draft, right before
    or behind. ``tokens_per_step``: accepted drafts and the target's own token. ``same_output``: the
    tokens of decoding without a draft. ``byte_floor_ratio``: the time that an idle GPU takes to
    read what a step without a draft must read, over what such a step took (CUDA). ``over_record``:
    tokens a second over those of the stored report.
    """

    over_no_draft: float | None = None
    tokens_per_step: float | None = field(default=None, metadata={FORMER_KEY: "tokens_a_step"})
    same_output: bool = False
    byte_floor_ratio: float | None = field(default=None, metadata={FORMER_KEY: "of_byte_floor"})
    over_record: float | None = None


@dataclass(frozen=True)
class Scenario:
    """``batch`` prompts of ``context`` tokens, decoded together.

    The prompts are those of ``prompts``, a file beside the suite's, taken in turn and repeated up
    to ``context``; without it random tokens. ``draft`` is "default", "none", or a tree as
    "1x3x3": top-k, depth, tokens. The scenario holds after ``passes`` passes in a row,
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
        least = {"context": 1, "batch": 1, "output_tokens": 2, "passes": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise SpecbuildError(f"scenario {self.name!r}: {name} must be at least {value}")
        if self.attempts < self.passes:
            raise SpecbuildError(
                f"scenario {self.name!r}: {self.attempts} attempts cannot pass {self.passes} times"
            )
        _ = self.speculation

    @property
    def speculation(self) -> Speculation:
        """The draft to decode with; SpecbuildError where it is none."""
        if self.draft == "default":
            return "default"
        if self.draft == "none":
            return None
        found = _SHAPE.fullmatch(self.draft)
        if found is None:
            raise SpecbuildError(
                f"scenario {self.name!r}: draft is {self.draft!r}, expected default, none, or "
                "top-k, depth and tokens as 1x3x3"
            )
        return DraftShape(*map(int, found.groups()))


@dataclass(frozen=True)
class Suite:
    """Scenarios in the order in which they run."""

    suite: str
    scenarios: tuple[Scenario, ...]


def shipped_suites() -> list[str]:
    """The names of the suites that come with specbuild."""
    return sorted(file.stem for file in _SHIPPED.glob("*.yaml"))


def read_suite(named: str) -> tuple[Suite, Path]:
    """A shipped suite, or one from a file; and the folder that its prompts stand in.

    Raises SpecbuildError where there is none such, or anything in it is wrong.
    """
    file = Path(named)
    if named in shipped_suites():
        file = _SHIPPED / f"{named}.yaml"
    elif not file.is_file():
        raise SpecbuildError(f"{named}: neither a file nor one of {', '.join(shipped_suites())}")
    suite = read_yaml(Suite, file)
    names = [scenario.name for scenario in suite.scenarios]
    if not names or len(set(names)) < len(names):
        raise SpecbuildError(f"{file}: needs scenarios with unique names")
    return suite, file.parent
