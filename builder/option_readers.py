"""What a command line gives, as the values that options hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from specbuild.runtime.errors import SpecbuildError

T = TypeVar("T")


def repeated(_flag: str, given: Sequence[T]) -> tuple[T, ...]:
    """The values of an option that may be repeated."""
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
