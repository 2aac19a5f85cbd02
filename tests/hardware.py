"""Marks for tests that need hardware or libraries which a machine may lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specbuild.runtime.executors.tensorrt.check import library_reason

_NO_TENSORRT_RTX = library_reason("tensorrt-rtx")
# TensorRT-RTX builds engines without a GPU, but a machine may lack its wheel.
needs_tensorrt_rtx = pytest.mark.skipif(_NO_TENSORRT_RTX is not None, reason=_NO_TENSORRT_RTX or "")


def need(
    items: list[pytest.Item],
    folder: Path,
    mark: pytest.MarkDecorator,
    missing: Callable[[], str | None],
) -> None:
    """Mark the tests of a folder, and skip them if ``missing`` returns a reason.

    ``missing`` is called once, and only if the folder has tests.
    """
    here = [item for item in items if folder in item.path.parents]
    reason = missing() if here else None
    for item in here:
        item.add_marker(mark)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
