"""Finds the GPU, and the case modules beside the op tests; the example model as an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hardware import need

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ops")]

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import Prompt


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
    need(items, Path(__file__).parent, pytest.mark.gpu, missing_gpu)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model with its draft, as a CUDA engine."""
    from example_engine import build_example

    return build_example(tmp_path_factory.mktemp("example") / "cuda")


@pytest.fixture(scope="session")
def engine(directory: Path) -> Iterator[Engine]:
    """The example engine on the GPU."""
    from example_engine import on_gpu

    with on_gpu(directory) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """The example's prompts."""
    from example_engine import example_prompts

    return example_prompts()
