"""Engines of GGUF files against engines of the same models from safetensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from deepseek_checkpoints import SIZES, YARN, write_deepseek
from gguf import GGUFReader
from gguf_files import write_gguf
from gguf_keys import APART, DEEPSEEK_KEYS, LLAMA_KEYS, LLAMA_KINDS, write_gpt_oss
from gguf_models import deepseek_twin, llama_twin
from llama_checkpoints import write_llama

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


def grouped(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a Llama, a Qwen3 or a Qwen3-MoE whose rows are multiples of blocks of 256."""
    changes = {"rope_parameters": None, "head_dim": 64} if kind == "llama" else {}
    write_llama(folder / "model", kind, hidden_size=256, **changes)
    tensors = llama_twin(
        folder / "model", json.loads((folder / "model" / "config.json").read_text())
    )
    architecture, keys = LLAMA_KINDS[kind]
    keys = LLAMA_KEYS | keys | {".embedding_length": 256}
    if kind == "llama":
        keys |= {".rope.dimension_count": 64}
    return folder / "model", write_gguf(folder / "model.gguf", architecture, keys, tensors)


@pytest.mark.parametrize(
    "write",
    [
        gpt_oss,
        partial(grouped, "llama"),
        *[
            pytest.param(write, marks=pytest.mark.slow)
            for write in (
                deepseek,
                partial(grouped, "qwen3"),
                partial(grouped, "qwen3_moe"),
            )
        ],
    ],
    ids=["gpt-oss", "llama", "deepseek", "qwen3", "qwen3moe"],
)
def test_engines_equal_those_from_safetensors(
    tmp_path: Path, command: Command, write: Write
) -> None:
    """Graphs, weights and generated tokens are equal."""
    outputs, files = [], []
    for place, model in enumerate(write(tmp_path)):
        engine = tmp_path / f"engine{place}"
        built = command(
            *("build", "--model", model, "--output", engine, "--max-seq-len", 64),
            *("--weights-dtype", "bf16"),
        )
        assert built.code == 0, built.err
        stored = read_manifest(engine).files
        files.append({n: f.xxh3_128 for n, f in stored.items() if n.endswith((".onnx", "tensors"))})
        arguments = (
            Prompt("0", prompt_ids=(3, 7, 9)),
            GenerateParams(max_new_tokens=48, ignore_eos=True),
        )
        events = Engine.load(engine).generate(*arguments, speculation=None)
        outputs += [e.record.output_ids for e in events if isinstance(e, FinishEvent)]
    assert files[0] == files[1]
    (facts,) = command("inspect", engine, "--json").records
    counts = Counter[str]()
    for types in facts["source_types"].values():
        counts.update(types)
    reader = GGUFReader(model)
    assert counts == Counter(tensor.tensor_type.name for tensor in reader.tensors)
    assert facts["source_types"]["token_embd.weight"].keys() <= counts.keys()
    assert "blk.N.attn_output.weight" in command("inspect", engine).out
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 48


def test_other_commands_accept_a_gguf_file(tmp_path: Path, command: Command) -> None:
    file = write_gguf(tmp_path / "model.gguf", "gpt-oss", {}, {})
    assert command("retrofit", "mla", "--model", file, "--rank", 8).refused(
        "is a GGUF file, which is not supported here"
    )
    build = ("build", "--output", tmp_path / "engine", "--model")
    assert command(*build, file).refused("model.gguf: gpt-oss: the field")
    absent = tmp_path / "absent.gguf"
    assert command(*build, absent).refused(
        "absent.gguf: cannot be read (No such file or directory)"
    )
