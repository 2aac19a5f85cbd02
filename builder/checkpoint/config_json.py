"""Typed access to the fields of a ``config.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.engine_dir.strict_json import brief
from specbuild.runtime.errors import SpecbuildError

# The largest size that engines store (int32), and a bound on numbers of layers or experts.
MAX_SIZE = 2**31 - 1
MAX_COUNT = 1 << 12
# Squares and reciprocals of numbers in this range are finite in fp32.
_SMALLEST, _LARGEST = 1e-16, 1e16


def check_numbers(where: str, data: Any) -> None:
    """Raise SpecbuildError for a number in decoded JSON above 64 bits, with its field.

    Python's JSON reader accepts NaN, Infinity, 1e400 (infinity) and integers of any size.
    """
    pending: list[tuple[str, Any]] = [("", data)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            pending += (
                (f"{place}.{name}" if place else name, item) for name, item in value.items()
            )
        elif isinstance(value, list):
            pending += ((f"{place}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            raise SpecbuildError(
                f"{where}: {place}: is not a finite number; correct the value in the file"
            )
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise SpecbuildError(
                f"{where}: {place}: is an integer beyond 64 bits; correct the value in the file"
            )


@dataclass(frozen=True)
class Config:
    """The fields of a configuration.

    ``where`` is its path, for errors; ``label`` names it in warnings, which an engine's manifest
    stores and which therefore have no path. Absent and null fields are equivalent. Every reader
    raises SpecbuildError for another type, and for an absent field without a default.
    """

    where: str
    label: str
    fields: dict[str, Any]

    def get(self, name: str) -> Any:
        """Return the raw field, or None."""
        return self.fields.get(name)

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self._value(name, default)
        if not _is_integer(value) or value < least:
            raise self.wrong(name, f"a whole number of {least} or more")
        if value > most:
            raise self.wrong(name, f"a whole number of at most {most}")
        number: int = value
        return number

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a number of layers or experts: memory is allocated for each of them."""
        return self.integer(name, default, least=least, most=MAX_COUNT)

    def optional_integer(self, name: str) -> int | None:
        """Return a positive integer, or None if the field is absent."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._value(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self.wrong(name, "a positive number")
        if not _SMALLEST <= value <= _LARGEST:
            raise self.wrong(name, f"a number from {_SMALLEST:g} to {_LARGEST:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers (a single one is a list), or None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if not all(_is_integer(item) and abs(item) <= MAX_SIZE for item in values):
            raise self.wrong(name, f"whole numbers of at most {MAX_SIZE}")
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of positive numbers; SpecbuildError if it is absent."""
        values = self._value(name, None)
        if not isinstance(values, list) or not values:
            raise self.wrong(name, "a list of positive numbers")
        if not all(_is_positive(item) for item in values):
            raise self.wrong(name, "positive numbers")
        return tuple(map(float, values))

    def text(self, name: str) -> str | None:
        """Return a string, or None if the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty if the field is absent."""
        value = [] if self.get(name) is None else self.get(name)
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def section(self, name: str) -> Config:
        """Return a nested object; an absent one has no fields."""
        value = {} if self.get(name) is None else self.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Config(f"{self.where}: {name}", f"{self.label}: {name}", value)

    def wrong(self, name: str, expected: str) -> SpecbuildError:
        """Return the error for an invalid field."""
        value = brief(self.get(name))
        return SpecbuildError(f"{self.where}: {name}: got {value}, expected {expected}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise SpecbuildError(f"{self.where}: the field {name} is missing")
        return default


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _SMALLEST <= value <= _LARGEST


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
