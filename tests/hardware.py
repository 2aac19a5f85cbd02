"""Marks for the tests of a folder that want hardware which a machine may lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def need(
    items: list[pytest.Item],
    folder: Path,
    mark: pytest.MarkDecorator,
    missing: Callable[[], str | None],
) -> None:
    """Marks the folder's tests; skips them if something is ``missing``, which is asked once, and
    only if there are such tests."""
    here = [item for item in items if folder in item.path.parents]
    reason = missing() if here else None
    for item in here:
        item.add_marker(mark)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
