"""Models with grouped-query attention as GGUF equal those from safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import stored, write_gguf
from gguf_keys import LLAMA_KEYS, LLAMA_KINDS
from gguf_models import LLAMA3_ROPE, llama3_factors, llama_twin
from llama_checkpoints import write_llama

from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.engine_dir.rope_scaling import LongRopeScaling
from specbuild.runtime.errors import SpecbuildError


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", LLAMA_KINDS)
def test_gguf_models_equal_safetensors(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tmp_path / "model"
    changes = {"rope_parameters": LLAMA3_ROPE} if kind == "llama" else {}
    write_llama(model, kind, tie_word_embeddings=tied, **changes)
    config = json.loads((model / "config.json").read_text())
    architecture, keys = LLAMA_KINDS[kind]
    tensors = llama_twin(model, config)
    if kind == "llama":
        tensors["rope_freqs.weight"] = stored(llama3_factors(16), "F32")[0]
    file = write_gguf(tmp_path / "model.gguf", architecture, LLAMA_KEYS | keys, tensors)
    result, expected = read_target(file, strict=True), read_target(model, strict=True)
    assert result.geometry.tied_head == tied
    assert result.geometry == replace(expected.geometry, eos_token_ids=())
    assert set(result.tensors) == set(expected.tensors)
    for name, source in result.tensors.items():
        assert source.shape == expected.tensors[name].shape, name
        assert torch.equal(source.load().float(), expected.tensors[name].load().float()), name
        if source.load_as is not None:  # except stacked experts
            assert torch.equal(source.load_as(torch.bfloat16), source.load().bfloat16()), name


def test_rejects_other_rope_factors(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_llama(model)
    tensors = llama_twin(model, json.loads((model / "config.json").read_text()))
    tensors["rope_freqs.weight"] = stored(torch.linspace(1, 8, 8), "F32")[0]
    file = write_gguf(tmp_path / "model.gguf", "llama", LLAMA_KEYS, tensors)
    with pytest.raises(SpecbuildError, match="does not scale as Llama 3 does"):
        read_target(file, strict=True)


def test_factors_of_longrope_are_read_from_tensors(tmp_path: Path) -> None:
    short, long = [1.0] * 8, [1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.5]
    model = tmp_path / "model"
    write_llama(model, "phi3", original_max_position_embeddings=64, rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short,
        "long_factor": long, "original_max_position_embeddings": 64})  # fmt: skip
    expected = read_target(model, strict=True)
    scaling = expected.geometry.rope.scaling
    assert isinstance(scaling, LongRopeScaling) and scaling.long_factors == tuple(long)
    architecture, keys = LLAMA_KINDS["phi3"]
    tensors = llama_twin(model, json.loads((model / "config.json").read_text()))
    tensors |= {
        f"rope_factors_{name}.weight": stored(torch.tensor(factors), "F32")[0]
        for name, factors in (("short", short), ("long", long))
    }
    keys = keys | {".rope.scaling.original_context_length": 64}
    own = {".rope.scaling.attn_factor": scaling.attention_factor}
    file = write_gguf(tmp_path / "model.gguf", architecture, LLAMA_KEYS | keys | own, tensors)
    result = read_target(file, strict=True).geometry.rope.scaling
    assert isinstance(result, LongRopeScaling)
    assert result.attention_factor == pytest.approx(scaling.attention_factor, rel=1e-6)
    assert replace(result, attention_factor=scaling.attention_factor) == scaling
    del tensors["rope_factors_short.weight"]
    file = write_gguf(tmp_path / "model.gguf", architecture, LLAMA_KEYS | keys, tensors)
    with pytest.raises(SpecbuildError, match=r"rope_factors_short\.weight and"):
        read_target(file, strict=True)


GEMMA4: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keys as values, experts": (
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
         "moe_intermediate_size": 24},
        {".attention.head_count_kv": [2, 1, 2, 1], ".expert_count": 8, ".expert_used_count": 3,
         ".expert_feed_forward_length": 24},
    ),
    "shared caches, inputs of layers": (
        {"attention_k_eq_v": False, "num_global_key_value_heads": None,
         "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32},
        {".attention.shared_kv_layers": 2, ".feed_forward_length": [96, 96, 192, 192],
         ".embedding_length_per_layer_input": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GEMMA4)
def test_gguf_files_of_gemma_4(tmp_path: Path, case: str) -> None:
    changes, own = GEMMA4[case]
    model = tmp_path / "model"
    write_llama(model, "gemma4_text", **changes)
    tensors = llama_twin(model, json.loads((model / "config.json").read_text()))
    factors = torch.tensor([1.0] * 4 + [1e30] * 12)
    tensors["rope_freqs.weight"] = stored(factors, "F32")[0]
    keys = {
        ".block_count": 4, ".attention.key_length": 32, ".attention.value_length": 32,
        ".attention.key_length_swa": 16, ".attention.value_length_swa": 16,
        ".rope.dimension_count": 32, ".rope.dimension_count_swa": 16, ".rope.freq_base": 1e6,
        ".rope.freq_base_swa": 1e4, ".attention.sliding_window": 12,
        ".attention.sliding_window_pattern": [True, False, True, False],
        ".final_logit_softcapping": 3.0,
    }  # fmt: skip
    file = write_gguf(tmp_path / "model.gguf", "gemma4", LLAMA_KEYS | keys | own, tensors)
    result, expected = read_target(file, strict=True), read_target(model, strict=True)
    assert result.geometry == replace(expected.geometry, eos_token_ids=())
    assert set(result.tensors) == set(expected.tensors)
    for name, source in result.tensors.items():
        assert torch.equal(source.load().float(), expected.tensors[name].load().float()), name
