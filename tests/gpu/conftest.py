"""Finds the GPU, and the case modules beside the op tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ops")]


def missing_gpu() -> str | None:
    """Why nothing here can run on a GPU, or None."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-bindings is not installed"
    try:
        status, *_ = driver.cuInit(0)
    except RuntimeError as error:
        return f"no CUDA driver: {error}"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"no GPU: {status.name}"
    device = driver.cuDeviceGet(0)[1]
    attributes = driver.CUdevice_attribute
    major = driver.cuDeviceGetAttribute(
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
    )[1]
    return None if major == 9 else f"the GPU has compute capability {major}.x, not 9.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs the GPU."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = missing_gpu() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
