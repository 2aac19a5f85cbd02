"""Fixtures shared by all tests. ``checkpoints.py`` writes the models."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_draft, write_target
from content_store import content_store
from file_times import FileTimes
from hypothesis import HealthCheck, settings
from left_out import draw_few
from passed_cases import PassedCases, summary
from run_store import made_once, use_folder_of
from shared_cubins import share_cubins
from shared_graphs import share_exports

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress

# A busy machine must not make a test fail.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-gpt-oss"


def pytest_configure(config: pytest.Config) -> None:
    """Record passed cases and times. Without slow tests, draw fewer examples."""
    draw_few("not slow" in config.getoption("markexpr"))
    config.pluginmanager.register(PassedCases())
    config.pluginmanager.register(FileTimes(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many unchanged cases were skipped."""
    line = summary(terminalreporter.stats.get("skipped", ()))
    if line is not None:
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Limit the size of the store after the workers of a run have ended."""
    if not hasattr(session.config, "workerinput"):
        content_store().evict()


@pytest.fixture(scope="session", autouse=True)
def made_once_in_a_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share slowly made files between all tests of a run."""
    use_folder_of(tmp_path_factory)
    share_exports()
    share_cubins()
    # The garbage collector would walk what torch and transformers hold again and again, and what
    # an export holds every few milliseconds: a tenth of the whole run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


@pytest.fixture(scope="session")
def example_engine(made_once_in_a_run: None) -> Path:
    """The example's CPU engine, built without options; read only."""
    options = BuildOptions(model=EXAMPLE / "target", draft=EXAMPLE / "draft", output=Path("unused"))
    return made_once(
        "example-engine", lambda path: build(replace(options, output=path), SilentProgress())
    )


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random MXFP4 target checkpoint; read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "target"
    write_target(path)
    return path


@pytest.fixture(scope="session")
def bf16_target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target checkpoint with bf16 experts in two shards; read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "target-bf16"
    write_target(path, experts_format="bf16", shards=2)
    return path


@pytest.fixture(scope="session")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random EAGLE3 draft that fits ``target_path``; read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "draft"
    write_draft(path)
    return path
