"""Options of ``inspect --anatomy``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.runtime.errors import SpecbuildError

# Measured on an H200 (benchmarks/results), in TB/s.
_READ_SPEED = 4.53


@dataclass(frozen=True, kw_only=True)
class AnatomyOptions(OptionGroup):
    """A step, from its plan alone. The default ``context`` is 1000, or the engine's maximum."""

    PANEL: ClassVar[str] = "Anatomy (CUDA)"

    anatomy: Annotated[
        bool, Described("Show each launch of a step: its bytes and dependencies.")
    ] = False
    batch: Annotated[int, Described("Number of sequences of the step.", "N", least=1)] = 1
    context: Annotated[
        int | None,
        Described("Tokens per sequence.", "N", least=1, shown="1000, or the engine's limit"),
    ] = None
    read_speed: Annotated[
        float,
        Described(
            "Memory bandwidth of a streaming read; the default is an H200's.", "TB/S", least=0.001
        ),
    ] = _READ_SPEED

    def __post_init__(self) -> None:
        if not self.anatomy and self.given():
            raise SpecbuildError("--batch, --context and --read-speed are for --anatomy: add it")
