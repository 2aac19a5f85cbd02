"""Find the GPU, and the case modules of the op tests; the example model as an engine.

With ``SPECBUILD_GPU_COMPILE_ONLY=1`` nothing runs. Tests compile what they would launch, on a
machine without a GPU, and are then skipped. `make gpu-cubins` fills an archive this way.
"""

from __future__ import annotations

import os
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


KERNELS = "test_kernels_gpu.py"
COMPILE_ONLY = os.environ.get("SPECBUILD_GPU_COMPILE_ONLY") == "1"


def missing_gpu() -> str | None:
    """Return why these tests cannot run on a GPU, or None."""
    if COMPILE_ONLY:
        return None
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


# Marks before pytest-xdist reads the groups, and sorts after pytest has put tests with the same
# fixture parameters together.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark every test as needing the GPU, and group the tests that share engines or a case.

    Groups start in this order: those of engines take up to two minutes, kernel cases at real sizes
    one, and thousands of short ones fill the workers at the end.
    """
    folder = Path(__file__).parent
    need(items, folder, pytest.mark.gpu, missing_gpu)
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(engine_group(item)))
    yield
    items.sort(key=lambda item: (item.path.name == KERNELS, ": gpu: " not in item.name))


def engine_group(item: pytest.Item) -> str:
    """Return the file of a test with the parameters that come from fixtures.

    A fixture with parameters builds an engine for each of them, so that only tests with equal ones
    share an engine. Parameters of the test function itself do not count. A test without a fixture
    that outlives it is a group of its own. Both phases of a kernel case share inputs and a
    reference, which take up to a minute of a processor.
    """
    own = {
        name.strip()
        for marker in item.iter_markers("parametrize")
        for name in (
            marker.args[0].split(",") if isinstance(marker.args[0], str) else marker.args[0]
        )
    }
    callspec = getattr(item, "callspec", None)
    if item.path.name == KERNELS and callspec is not None and "case" in callspec.params:
        return f"{callspec.params['op'].name}: {callspec.params['case'].name}"
    if not _shares_a_fixture(item):
        return item.nodeid
    indices = {} if callspec is None else callspec.indices
    shared = [f"{name}-{index}" for name, index in sorted(indices.items()) if name not in own]
    return "-".join((item.path.stem, *shared))


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a fixture of these tests, other than ``prompts``, lives beyond the test."""
    assert isinstance(item, pytest.Function)
    return any(
        fixtures[-1].scope != "function" and fixtures[-1].baseid.startswith("tests/gpu")
        for name, fixtures in item._fixtureinfo.name2fixturedefs.items()
        if name != "prompts"
    )


if COMPILE_ONLY:
    # Runs before test modules import the replaced functions.
    from compile_only import compile_only, skipping

    compile_only()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup() -> Iterator[None]:
        """In compile-only mode, an engine is compiled although it cannot be loaded."""
        with skipping():
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call() -> Iterator[None]:
        """In compile-only mode, a test ends when it needs results."""
        with skipping():
            yield


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
