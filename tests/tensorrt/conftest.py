"""Find full TensorRT and a GPU; the example model as an engine that TensorRT has built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hardware import need

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("gpu", "ops")]

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import Prompt


def missing() -> str | None:
    """Return why these tests cannot run, or None."""
    from specbuild.runtime.errors import SpecbuildError
    from specbuild.runtime.executors.cuda.driver import open_gpu
    from specbuild.runtime.executors.tensorrt.library import load

    try:
        load("tensorrt")
        gpu = open_gpu()
    except SpecbuildError as error:
        return str(error)
    capability = gpu.facts.capability
    gpu.close()
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not 9.0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as needing TensorRT."""
    need(items, Path(__file__).parent, pytest.mark.tensorrt, missing)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model with its draft, built by TensorRT."""
    from example_engine import build_example

    output = tmp_path_factory.mktemp("example") / "tensorrt"
    build_example(output, "tensorrt")
    return output


@pytest.fixture(scope="session")
def engine(directory: Path) -> Iterator[Engine]:
    """The engine, loaded."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.executors.tensorrt.executor import TensorRtExecutor

    loaded = Engine.load(directory)
    yield loaded
    assert isinstance(loaded.executor, TensorRtExecutor)
    loaded.executor.close()


@pytest.fixture(scope="session")
def cuda_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same model for the CUDA target."""
    from example_engine import build_example

    from specbuild.runtime.engine import Engine
    from specbuild.runtime.executors.cuda.executor import CudaExecutor

    output = tmp_path_factory.mktemp("example") / "cuda"
    build_example(output)
    loaded = Engine.load(output)
    yield loaded
    assert isinstance(loaded.executor, CudaExecutor)
    loaded.executor.close()


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same plugins without TensorRT."""
    from plugin_walk import build_walked, load_walked

    from specbuild.runtime.executors.tensorrt.executor import TensorRtExecutor

    output = tmp_path_factory.mktemp("example") / "walked"
    build_walked(output)
    loaded = load_walked(output)
    yield loaded
    assert isinstance(loaded.executor, TensorRtExecutor)
    loaded.executor.close()


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """The example's prompts."""
    from example_engine import example_prompts

    return example_prompts()
