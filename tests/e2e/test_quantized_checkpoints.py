"""Engines of quantized checkpoints: their tokens equal transformers on the dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config
from command_line import Command
from llama_checkpoints import write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.training.frozen_target import load_target
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

ACTIVATIONS = "not rounded (the scheme: float4, dynamic, a tensor_group)"


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_quantized_checkpoints_equal_transformers(
    tmp_path: Path, command: Command, name: str
) -> None:
    """Use the checkpoint's quantized values, and weights that the build dequantizes."""
    write_llama(tmp_path / "model")
    write_quantized(tmp_path, FORMATS[name])
    prompt = (3, 7, 9)
    for option in (("--weights-dtype", "bf16"), ("--cpu-math", "exact")):
        engine = tmp_path / option[1]
        built = command(
            *("build", "--model", tmp_path / "model", "--output", engine, "--max-seq-len", 64),
            *option,
        )
        assert built.code == 0, built.err
        params = GenerateParams(max_new_tokens=48, ignore_eos=True)
        arguments = (Prompt("0", prompt_ids=prompt), params)
        events = Engine.load(engine).generate(*arguments, speculation=None)
        (output,) = (e.record.output_ids for e in events if isinstance(e, FinishEvent))
        ids = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            best = load_target(tmp_path / "plain", teacher=False)(ids).logits[0].argmax(-1)
        assert list(output) == best[len(prompt) - 1 : -1].tolist(), option


def test_experts_are_loaded_one_by_one(tmp_path: Path, command: Command) -> None:
    """``verify`` compares with transformers on the dequantized weights."""
    write_llama(
        tmp_path / "model", "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=32,
        head_dim=32,
    )  # fmt: skip
    write_quantized(tmp_path, FORMATS["compressed-tensors fp8 dynamic"])
    engine = tmp_path / "engine"
    model = tmp_path / "model"
    built = command("build", "--model", model, "--output", engine, "--max-seq-len", 64)
    assert built.code == 0, built.err
    assert "rounds activations (float8, dynamic, a token)" in built.err
    verified = command("verify", engine, "--model", model)
    assert verified.code == 0, verified.err


def test_inspect_and_the_report_show_the_format(tmp_path: Path, command: Command) -> None:
    write_llama(tmp_path / "model")
    write_quantized(tmp_path, FORMATS["compressed-tensors nvfp4"])
    (facts,) = command("inspect", tmp_path / "model", "--json").records
    assert facts["quantization"]["scheme"] == "compressed-tensors nvfp4-pack-quantized"
    assert facts["quantization"]["activations"] == ACTIVATIONS
    assert facts["types"]["nvfp4"] == 21
    text = command("inspect", tmp_path / "model").out
    assert "compressed-tensors nvfp4-pack-quantized" in text and "not rounded" in text
    engine = tmp_path / "engine"
    command("build", "--model", tmp_path / "model", "--output", engine, "--max-seq-len", 64)
    report = json.loads((engine / "build_report.json").read_text())
    assert report["quantization"] == {
        "scheme": "compressed-tensors nvfp4-pack-quantized",
        "activations": ACTIVATIONS,
    }
    assert report["source_types"]["model.layers.N.mlp.up_proj.weight"] == {"nvfp4": 3}
    text = command("inspect", engine).out
    assert "compressed-tensors nvfp4-pack-quantized" in text and "not rounded" in text


def test_rejects_a_quantization_config_without_quantized_weights(
    tmp_path: Path, command: Command
) -> None:
    write_llama(tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    built = command("build", "--model", tmp_path / "model", "--output", tmp_path / "engine")
    assert built.code == 2
    assert "no tensor is stored quantized; remove the section" in built.err
