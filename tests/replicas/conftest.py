"""Find Ray; its tests are run by ``make test-ray`` only."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hardware import need


def missing() -> str | None:
    """Return why these tests cannot run, or None."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: make test-ray installs it"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as slow and needing Ray."""
    need(items, Path(__file__).parent, pytest.mark.ray, missing)
