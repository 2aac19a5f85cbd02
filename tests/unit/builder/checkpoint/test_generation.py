"""Sampling defaults of a checkpoint: generation_config.json, and general.sampling keys of GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.checkpoint.generation import directory_defaults, gguf_defaults
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults


def written(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_the_first_generation_config_is_read(tmp_path: Path) -> None:
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}
    first = written(tmp_path / "first", qwen)
    second = written(tmp_path / "second", {"temperature": 1})
    expected = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert directory_defaults((first, second)) == (expected, ())
    assert directory_defaults((tmp_path, second)) == (GenerationDefaults(temperature=1.0), ())
    assert directory_defaults((tmp_path,)) == (GenerationDefaults(), ())


def test_files_without_sampling_give_no_defaults(tmp_path: Path) -> None:
    folder = written(tmp_path, {"do_sample": False, "temperature": None, "num_beams": 4})
    assert directory_defaults((folder,)) == (GenerationDefaults(), ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", True),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_invalid_values_are_omitted(tmp_path: Path, name: str, value: Any) -> None:
    defaults, warnings = directory_defaults((written(tmp_path, {name: value}),))
    assert getattr(defaults, name) is None
    (warning,) = warnings
    assert name in warning and "generation_config.json" in warning


def test_top_k_minus_one_means_all_tokens(tmp_path: Path) -> None:
    assert directory_defaults((written(tmp_path, {"top_k": -1}),))[0].top_k == 0


def test_keys_of_gguf() -> None:
    keys = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
        "general.sampling.top_p": 0.75,
        "general.sampling.min_p": 0.25,
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.mirostat": 2,
    }
    expected = GenerationDefaults(
        temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, repetition_penalty=1.5
    )
    assert gguf_defaults(keys) == (expected, ())
    assert gguf_defaults({}) == (GenerationDefaults(), ())
