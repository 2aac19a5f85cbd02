"""What a command line gives, as the values that options hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbuild.runtime.errors import SpecbuildError


def paths(_flag: str, given: Sequence[Path]) -> tuple[Path, ...]:
    """The paths of an option that may be repeated."""
    return tuple(given)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The numbers of ``1,11,21``; SpecbuildError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecbuildError(
            f"{flag} {text} is not a list of numbers: write them as 1,11,21"
        ) from error


def listed(values: Sequence[int]) -> str:
    """What ``numbers`` reads as these."""
    return ",".join(map(str, values))


def opposite(_flag: str, given: bool) -> bool:
    """Of a switch that turns its field off."""
    return not given
