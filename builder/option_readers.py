"""Converts values of a command line to values of options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from specbuild.runtime.errors import SpecbuildError

T = TypeVar("T")
_BYTES = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_MAX_BYTES = 2**63 - 1
_BYTES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def repeated(_flag: str, given: Sequence[T]) -> tuple[T, ...]:
    """Return the values of an option that may be repeated."""
    return tuple(given)


def places(_flag: str, given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """Return paths of an option that may be repeated; a file may have a single one."""
    return (Path(given),) if isinstance(given, Path | str) else tuple(map(Path, given))


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return the numbers of ``1,11,21``; SpecbuildError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecbuildError(
            f"{flag} {text} is not a list of numbers: write them as 1,11,21"
        ) from error


def listed(values: Sequence[int]) -> str:
    """Return the text that ``numbers`` reads."""
    return ",".join(map(str, values))


def probabilities(flag: str, given: float | str) -> float | tuple[float, float]:
    """Return the probability ``0.7``, or both ends of ``0.4:0.9``; SpecbuildError otherwise."""
    try:
        ends = tuple(float(part) for part in str(given).split(":"))
    except ValueError:
        ends = ()
    in_order = all(low <= high for low, high in pairwise((0.0, *ends, 1.0)))
    if len(ends) not in (1, 2) or not in_order:
        raise SpecbuildError(
            f"{flag} {given} is no probability: give one from 0 to 1, or a range as 0.4:0.9"
        )
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])


def opposite(_flag: str, given: bool) -> bool:
    """Return the negation, for a switch that turns its field off."""
    return not given


def memory_size(flag: str, text: str) -> int:
    """Return the bytes of ``4GiB`` or ``500MB``; SpecbuildError for anything else."""
    found = re.fullmatch(r"([0-9.]+) *([a-z]*)", text.strip(), re.IGNORECASE)
    number, unit = found.groups() if found else ("0", "")
    try:
        size = float(number) * _BYTES[unit.upper()]
    except (KeyError, ValueError):
        size = 0
    if size < 1:
        raise SpecbuildError(f"{flag} {text} is not a size: write it as 4GiB or 500MiB")
    if size > _MAX_BYTES:
        raise SpecbuildError(f"{flag} {text} is more than 8 EiB; give at most the memory there is")
    return int(size)
