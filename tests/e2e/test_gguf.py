"""Engines of GGUF files against engines of the same models from safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from deepseek_checkpoints import SIZES, YARN, write_deepseek
from gguf_files import write_gguf
from gguf_keys import APART, DEEPSEEK_KEYS, write_gpt_oss
from gguf_models import deepseek_twin

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

Write = Callable[[Path], tuple[Path, Path]]


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    model, keys, tensors = write_gpt_oss(folder)
    return model, write_gguf(folder / "model.gguf", "gpt-oss", keys, tensors)


def deepseek(folder: Path) -> tuple[Path, Path]:
    changes: dict[str, Any] = {"rope_parameters": YARN | {"mscale": 0.8}, "eos_token_id": None}
    write_deepseek(folder / "model", **changes)
    tensors = deepseek_twin(folder / "model", SIZES, apart=True)
    keys = DEEPSEEK_KEYS | APART
    return folder / "model", write_gguf(folder / "model.gguf", "deepseek2", keys, tensors)


@pytest.mark.parametrize("write", [gpt_oss, pytest.param(deepseek, marks=pytest.mark.slow)])
def test_tokens_and_files_are_those_from_safetensors(
    tmp_path: Path, command: Command, write: Write
) -> None:
    """Graphs and weights are equal to the byte, and so is what they decode."""
    outputs, files = [], []
    for place, model in enumerate(write(tmp_path)):
        engine = tmp_path / f"engine{place}"
        built = command("build", "--model", model, "--output", engine, "--max-seq-len", 64)
        assert built.code == 0, built.err
        stored = read_manifest(engine).files
        files.append({n: f.xxh3_128 for n, f in stored.items() if n.endswith((".onnx", "tensors"))})
        asked = (
            Prompt("0", prompt_ids=(3, 7, 9)),
            GenerateParams(max_new_tokens=48, ignore_eos=True),
        )
        events = Engine.load(engine).generate(*asked, speculation=None)
        outputs += [e.record.output_ids for e in events if isinstance(e, FinishEvent)]
    assert files[0] == files[1]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 48


def test_what_else_a_gguf_file_may_be_given_to(tmp_path: Path, command: Command) -> None:
    file = write_gguf(tmp_path / "model.gguf", "gpt-oss", {}, {})
    data = tmp_path / "text.txt"
    data.write_text("text")
    train = ("train", "draft", "--model", file, "--output", tmp_path / "draft", "--text", data)
    for words in (("retrofit", "mla", "--model", file, "--rank", 8), train):
        assert command(*words).refused("is a GGUF file, which only build --model reads")
    build = ("build", "--output", tmp_path / "engine", "--model")
    assert command(*build, file).refused("model.gguf: gpt-oss: the field")
    absent = tmp_path / "absent.gguf"
    assert command(*build, absent).refused(
        "absent.gguf: cannot be read (No such file or directory)"
    )
