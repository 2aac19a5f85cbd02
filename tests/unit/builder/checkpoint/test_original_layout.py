"""OpenAI's "original" layout gives the same model as the Hugging Face layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import edit_config, edit_tensors, write_json
from checkpoints import write_target

from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.errors import SpecbuildError


@pytest.mark.parametrize("shards", [1, 2])
def test_both_layouts_give_the_same_model(tmp_path: Path, shards: int) -> None:
    hf, original = tmp_path / "hf", tmp_path / "openai"
    write_target(hf, seed=5, q_heads=6, kv_heads=3, rope_spelling="rope_scaling")
    write_target(original, seed=5, q_heads=6, kv_heads=3, layout="original", shards=shards)
    one, other = read_target(hf, strict=True), read_target(original, strict=True)
    assert dataclasses.replace(one.geometry, eos_token_ids=()) == other.geometry
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        twin = other.tensors[name]
        assert (twin.name, twin.dtype, twin.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(twin.load(), tensor.load())


def test_parts_of_qkv_are_slices_of_the_file(tmp_path: Path) -> None:
    written = write_target(tmp_path, layout="original")
    tensors = read_target(tmp_path, strict=True).tensors
    for part in "qkv":
        for kind in ("weight", "bias"):
            name = f"model.layers.2.self_attn.{part}_proj.{kind}"
            tensor = tensors[name]
            assert tensor.sources == (f"block.2.attn.qkv.{kind}",)
            raw = written[name].view(torch.uint8).numpy().tobytes()
            stored = np.memmap(tensor.file, np.uint8, "r", offset=tensor.offset, shape=len(raw))
            assert stored.tobytes() == raw


def test_the_eos_of_the_release_is_the_default(tmp_path: Path) -> None:
    write_target(tmp_path, layout="original", vocab=201088, hidden=32, layers=1)
    checkpoint = read_target(tmp_path, strict=True)
    assert checkpoint.geometry.eos_token_ids == (200002, 199999, 200012)
    assert "the build uses the release's (200002, 199999, 200012)" in checkpoint.warnings[0]


def test_text_and_eos_come_from_the_parent_folder(tmp_path: Path) -> None:
    write_target(tmp_path, vocab=300, tokenizer=True, chat_template="x", eos=(4, 5))
    write_target(tmp_path / "original", layout="original", vocab=300)
    checkpoint = read_target(tmp_path / "original", strict=True)
    assert checkpoint.geometry.eos_token_ids == (4, 5)
    assert [file.name for file in checkpoint.text_files] == [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    assert read_target(tmp_path, strict=True).geometry == checkpoint.geometry


def test_errors_have_the_tensor_names_on_disk(tmp_path: Path) -> None:
    write_target(tmp_path, layout="original")

    def breaking(tensors: dict[str, torch.Tensor]) -> None:
        tensors["block.1.attn.extra.weight"] = torch.rand(2)
        del tensors["block.3.mlp.mlp2_weight.scales"]
        tensors["block.0.mlp.gate.bias"] = torch.rand(5)

    edit_tensors(tmp_path, breaking)
    with pytest.raises(SpecbuildError) as caught:
        read_target(tmp_path, strict=True)
    message = str(caught.value)
    assert "3 tensors do not fit" in message
    assert "left over: block.1.attn.extra.weight" in message
    assert "missing: model.layers.3.mlp.experts.down_proj_scales" in message
    assert "wrong shape: block.0.mlp.gate.bias: got [5], expected [4]" in message


def test_rejects_qkv_of_another_geometry(tmp_path: Path) -> None:
    write_target(tmp_path, layout="original")
    edit_config(tmp_path, num_key_value_heads=4)
    with pytest.raises(SpecbuildError, match=r"qkv\.bias has shape \[128\], expected 192 rows"):
        read_target(tmp_path, strict=True)


def test_unknown_field(tmp_path: Path) -> None:
    write_target(tmp_path, layout="original")
    edit_config(tmp_path, packed_qkv=True)
    assert "packed_qkv" in read_target(tmp_path, strict=False).warnings[0]
    with pytest.raises(SpecbuildError, match="unknown fields packed_qkv"):
        read_target(tmp_path, strict=True)


def test_no_scaling(tmp_path: Path) -> None:
    write_target(tmp_path, layout="original")
    edit_config(tmp_path, rope_scaling_factor=1.0)
    rope = read_target(tmp_path, strict=True).geometry.rope
    assert (rope.scaling, rope.attention_factor, rope.theta) == (None, 1.0, 150000.0)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 9})
    assert read_target(tmp_path, strict=True).geometry.eos_token_ids == (9,)


def test_text_in_the_folder_overrides_the_parent_folder(tmp_path: Path) -> None:
    write_target(tmp_path, vocab=300, tokenizer=True, eos=(4, 5))
    write_target(tmp_path / "original", layout="original", vocab=300, tokenizer=True)
    write_json(tmp_path / "original" / "generation_config.json", {"eos_token_id": 9})
    checkpoint = read_target(tmp_path / "original", strict=True)
    assert checkpoint.geometry.eos_token_ids == (9,)
    assert {file.parent.name for file in checkpoint.text_files} == {"original"}
