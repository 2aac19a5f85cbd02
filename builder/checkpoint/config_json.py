"""Typed access to the fields of a ``config.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class Config:
    """The fields of a configuration.

    ``where`` is its path, for errors; ``label`` names it in warnings, which go into an engine's
    manifest and so hold no path.
    A field that is absent and one that is null are the same. Every reader raises SpecbuildError for
    another type, and for an absent field that has no default.
    """

    where: str
    label: str
    fields: dict[str, Any]

    def get(self, name: str) -> Any:
        """The field as it stands, or None."""
        return self.fields.get(name)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number, ``least`` or more."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"a whole number of {least} or more")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A whole number of 1 or more, or None where the field is absent."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self.wrong(name, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers (one alone counts as a list), or None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.wrong(name, "whole numbers")
        return tuple(values)

    def text(self, name: str) -> str | None:
        """A string, or None where the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty where the field is absent."""
        value = [] if self.get(name) is None else self.get(name)
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def section(self, name: str) -> Config:
        """A nested object; an absent one has no fields."""
        value = {} if self.get(name) is None else self.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Config(f"{self.where}: {name}", f"{self.label}: {name}", value)

    def wrong(self, name: str, expected: str) -> SpecbuildError:
        """The error for a field that is not what it should be."""
        return SpecbuildError(f"{self.where}: {name}: got {self.get(name)!r}, expected {expected}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise SpecbuildError(f"{self.where}: the field {name} is missing")
        return default
