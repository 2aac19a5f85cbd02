"""Finds Ray; its tests run by ``make test-ray`` alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hardware import need


def missing() -> str | None:
    """Why nothing here can run, or None."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: make test-ray installs it"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs Ray, and minutes."""
    need(items, Path(__file__).parent, pytest.mark.ray, missing)
