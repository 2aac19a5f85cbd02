"""A pytest plugin for vLLM's tests without vLLM: stand-ins for its modules, and the outcomes.

The tests import classes of vLLM at the top of a file. Each import succeeds; a call of a stand-in
raises :class:`VllmItselfError`, so that a test of vLLM's own classes fails with this reason. Tests
that only ask a server do not notice. The outcomes go to the file of ``SPECBUILD_JUDGED_OUTCOMES``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class VllmItselfError(Exception):
    """A test calls a class or function of vLLM."""


# Non-empty while a test or one of its fixtures runs.
IS_RUNNING: list[str] = []


class StandIn:
    """A class, function or value of vLLM. It may be named, subclassed and raised, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        # At the top of a file, values for tests may be made.
        if IS_RUNNING:
            raise VllmItselfError(self._name)
        return StandIn(f"{self._name}()")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return (Exception,)

    def __or__(self, _other: Any) -> Any:
        return object

    __ror__ = __or__


class Platform:
    """The platform of vLLM: a CPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_") or name.startswith("supports_"):
            return lambda *_: name == "is_cpu"
        if name == "device_count":
            return lambda: 0
        raise AttributeError(name)


class Hub:
    """The client of a hub. What the tests download of it is left out of the servers' flags."""

    def snapshot_download(self, repo_id: str) -> str:
        """No folder."""
        return repo_id


class ModelConfig:
    """The configuration of the engine's model."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        """The number of logits."""
        file = Path(os.environ["SPECBUILD_JUDGED_ENGINE"]) / "manifest.json"
        manifest = json.loads(file.read_text(encoding="utf-8"))
        return int(manifest["target"]["vocab"])


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer of the engine, opened by transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.environ["SPECBUILD_JUDGED_ENGINE"])


REAL: dict[str, Any] = {
    "vllm.version.__version__": version("specbuild"),
    "vllm.platforms.current_platform": Platform(),
    "vllm.transformers_utils.repo_utils.hf_api": Hub,
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.tokenizers.get_tokenizer": get_tokenizer,
}


class VllmModules(MetaPathFinder, Loader):
    """Finds every module of vLLM, each with any attribute."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """A package for ``vllm`` and all below it."""
        is_vllm = name == "vllm" or name.startswith("vllm.")
        return ModuleSpec(name, self, is_package=True) if is_vllm else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module whose attributes are stand-ins."""
        module = ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return REAL.get(f"{spec.name}.{name}", StandIn(f"{spec.name}.{name}"))

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


sys.meta_path.insert(0, VllmModules())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Marks the time in which calls of stand-ins fail."""
    IS_RUNNING.append(item.nodeid)
    done = yield
    IS_RUNNING.pop()
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Writes a line for each test: its name, outcome and the last line of a failure."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        entry = {"test": item.nodeid, "outcome": report.outcome, "error": error[:2000]}
        with Path(os.environ["SPECBUILD_JUDGED_OUTCOMES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    return report
