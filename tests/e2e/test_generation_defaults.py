"""The sampling of generation_config.json from the checkpoint to the tokens of ``run``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.request import DEFAULT_PARAMS
from specbuild.runtime.settings import RuntimeSettings

STATED = {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine(text_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of a checkpoint that recommends sampling with one invalid value."""
    folder = tmp_path_factory.mktemp("recommended")
    shutil.copytree(text_target, folder / "target")
    file = folder / "target" / "generation_config.json"
    config = json.loads(file.read_text()) | STATED | {"do_sample": True, "min_p": 3}
    file.write_text(json.dumps(config))
    limits = LimitOptions(max_seq_len=64)
    build(
        BuildOptions(model=folder / "target", output=folder / "engine", limits=limits),
        SilentProgress(),
    )
    return folder / "engine"


def test_the_manifest_stores_the_recommended_sampling(engine: Path, tiny_engine: Path) -> None:
    manifest = read_manifest(engine)
    assert manifest.generation == GenerationDefaults(**STATED)
    assert "generation_defaults" in manifest.features
    assert any("min_p is 3" in warning for warning in manifest.warnings)
    # Without recommended sampling nothing is stored, so that older runtimes load the engine.
    plain = json.loads((tiny_engine / "manifest.json").read_text())
    assert "generation" not in plain and "generation_defaults" not in plain["features"]


def record(command: Command, engine: Path, *options: object) -> dict[str, Any]:
    result = command(
        "run", engine, "--prompt", "ab", "--json", "--ignore-eos", "--seed", 5, *options
    )
    assert result.code == 0, result.err
    line: dict[str, Any] = json.loads(result.out)
    return line


def test_run_uses_the_recommended_sampling(command: Command, engine: Path) -> None:
    by_default = record(command, engine)["output_ids"]
    assert len(by_default) == 6
    stated = ("--temperature", 0.8, "--top-k", 7, "--top-p", 0.9)
    none = ("--generation-config", "none")
    six = ("--max-new-tokens", 6)
    assert record(command, engine, *none, *stated, *six)["output_ids"] == by_default
    greedy = record(command, engine, *none, *six)["output_ids"]
    assert greedy == record(command, engine, "--temperature", 0)["output_ids"]
    assert greedy != by_default
    refused = command("run", engine, "--prompt", "ab", "--generation-config", "some")
    assert refused.code == 2 and "auto" in refused.err


def test_python_uses_the_recommended_sampling_unless_disabled(engine: Path) -> None:
    params = Engine.load(engine).default_params
    assert params.max_new_tokens == 6
    assert (params.sampling.temperature, params.sampling.top_k) == (0.8, 7)
    settings = RuntimeSettings(generation_config="none")
    assert Engine.load(engine, settings).default_params == DEFAULT_PARAMS
