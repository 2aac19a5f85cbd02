"""Reduce the cases of ``make test``: no slow cases, and few examples of property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., Any])

FEWEST = 5
_DRAWN = {"few": False}


def draw_few(few: bool) -> None:
    """Set whether property tests imported from now on draw few examples."""
    _DRAWN["few"] = few


def examples_of(most: int) -> int:
    """Return the number of examples: without slow tests a quarter, but at least five."""
    return min(most, max(FEWEST, most // 4)) if _DRAWN["few"] else most


def examples(most: int) -> Callable[[Test], Test]:
    """Limit the examples of a property test; ``make test-slow`` draws them all."""

    def decorate(test: Test) -> Test:
        return pytest.mark.drawn(settings(max_examples=examples_of(most))(test))

    return decorate


def slow(*cases: Any) -> list[Any]:
    """Mark further cases of a test, each a value or a tuple, for ``make test-slow``."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]
