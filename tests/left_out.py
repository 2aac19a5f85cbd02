"""What ``make test`` leaves out for its time: slow cases, and most examples of property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., Any])

FEWEST = 5
_DRAWN = {"few": False}


def draw_few(few: bool) -> None:
    """Says whether property tests that are imported from now on draw few examples."""
    _DRAWN["few"] = few


def examples_of(most: int) -> int:
    """So many; in a run without slow tests a quarter of them, but five where there are five."""
    return min(most, max(FEWEST, most // 4)) if _DRAWN["few"] else most


def examples(most: int) -> Callable[[Test], Test]:
    """Lets a property test draw at most so many examples; ``make test-slow`` draws them all."""

    def decorate(test: Test) -> Test:
        return pytest.mark.drawn(settings(max_examples=examples_of(most))(test))

    return decorate


def slow(*cases: Any) -> list[Any]:
    """Further cases of a test, each a value or a tuple of them, for ``make test-slow``."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]
