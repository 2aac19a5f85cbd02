"""Rejected EAGLE3 drafts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors
from checkpoints import write_draft, write_target
from geometries import GPT_OSS_20B
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.tensorrt.standard.check import require_standard_support
from specbuild.builder.families.checkpoints import read_draft
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

LATENT = {
    "kv_lora_rank": 40, "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}  # fmt: skip


def refusal(path: Path, geometry: TargetGeometry, *, strict: bool = False, **message: Any) -> str:
    with pytest.raises(SpecbuildError) as caught:
        read_draft(path, geometry, strict=strict, **message)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: got 15, expected an even number"),
        ({"v_head_dim": None}, "v_head_dim"),
        ({"attention_bias": True}, "do not support biases"),
        ({"mlp_bias": True}, "do not support biases"),
        ({"sliding_window": 9, "use_sliding_window": True}, "or windows"),
        ({"kv_lora_rank": 41}, "kv_a_layernorm.weight: got [40], expected [41]"),
    ],
)
def test_rejects_drafts_with_unsupported_latents(
    tmp_path: Path, geometry: TargetGeometry, changes: dict, message: str
) -> None:
    write_draft(tmp_path, latent=LATENT)
    edit_config(tmp_path, **changes)
    assert message in refusal(tmp_path, geometry)


def test_rejects_an_incomplete_layer(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, layers=3)
    edit_tensors(tmp_path, lambda t: t.pop("layers.1.mlp.up_proj.weight"))
    assert "missing: layers.1.mlp.up_proj.weight, shape [96, 64]" in refusal(tmp_path, geometry)
    edit_tensors(tmp_path, lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.1.")])
    assert "left over: layers.2.mlp.up_proj.weight" in refusal(tmp_path, geometry)


def test_rejects_the_meaning_of_an_unset_flag(draft: Path, geometry: TargetGeometry) -> None:
    message = refusal(draft, geometry, norm_output="head")
    assert "--draft-norm-output head: norm_output is not true in" in message


@pytest.mark.parametrize(
    ("variant", "message", "standard"),
    [
        (
            {"latent": LATENT},
            "the draft's kv_lora_rank is 40, but CUDA kernels need a multiple of 32",
            "which TensorRT-RTX does not support; build with --backend cpu or cuda, or without",
        ),
        (
            {"layers": 3},
            "the draft has 3 layers, which only CPU engines support",
            "which TensorRT-RTX does not support; build with --backend cpu, or without --draft",
        ),
    ],
)
def test_rejects_variants_without_kernels(
    tmp_path: Path, geometry: TargetGeometry, variant: dict, message: str, standard: str
) -> None:
    write_draft(tmp_path, **variant)
    draft = read_draft(tmp_path, geometry, strict=True).geometry
    with pytest.raises(SpecbuildError, match=re.escape(message)):
        require_cuda_support(GPT_OSS_20B, draft)
    options = BuildOptions(model=tmp_path, output=tmp_path / "engine")
    with pytest.raises(SpecbuildError, match=re.escape(standard)):
        require_standard_support(GPT_OSS_20B, draft, options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "its vocab_size is 300, the target's 256"),
        ({"target_hidden_size": 128}, "its target_hidden_size is 128, the target's hidden size 64"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 KV heads"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"hidden_size": 48}, "shares the target's embedding, but its hidden size is 48"),
        ({"draft_vocab_size": 300}, "its draft vocabulary is 300, but the target's is 256"),
    ],
)
def test_rejects_drafts_that_do_not_match_the_target(
    draft: Path, geometry: TargetGeometry, changes: dict, message: str
) -> None:
    edit_config(draft, **changes)
    text = refusal(draft, geometry)
    assert "does not fit the target: " in text
    assert message in text


def test_lists_every_mismatch(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, hidden=32, draft_vocab=None, aux_layers=(7, 8, 9))
    edit_config(tmp_path, vocab_size=99)
    message = refusal(tmp_path, geometry)
    for part in (
        "its vocab_size is 99",
        "it reads layers [7, 8, 9]",
        "it shares the target's embedding and head, but its hidden size is 32",
    ):
        assert part in message


def test_rejects_the_draft_of_a_wider_target(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, target_hidden=80)
    assert "fc.weight is 240 wide, expected a multiple of the target's hidden size 64" in refusal(
        tmp_path, geometry
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "missing: midlayer.self_attn.q_proj.bias, shape [128]"),
        ({"qkv_bias": True}, "missing: midlayer.self_attn.v_proj.bias, shape [64]"),
        ({"mlp_bias": True}, "missing: midlayer.mlp.up_proj.bias, shape [96]"),
        ({"logit_scale": 0.5}, "logit_scale 0.5 is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"model_type": "qwen3"}, "missing: midlayer.self_attn.q_norm.weight, shape [32]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, expected a whole number of 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no', expected true or false"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: these weights are quantized, which is not implemented",
        ),
        ({"architectures": ["MedusaModel"]}, "got ['MedusaModel'], expected a supported draft"),
        ({"architectures": None}, "architectures: got [], expected a supported draft"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm False is not"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm True is not"),
        ({"eagle_config": [1]}, "eagle_config: got [1], expected an object"),
        ({"norm_output": "yes"}, "norm_output: got 'yes', expected true or false"),
        ({"sliding_window": 9}, "sliding_window 9 needs use_sliding_window"),
        ({"use_sliding_window": True}, "sliding_window: got None, expected the width"),
        ({"layer_types": ["chunked_attention"]}, "layer_types: got ['chunked_attention']"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type 'ntk' is not implemented"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not implemented"),
        (
            {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
            "is a GPT-OSS target, not a draft; pass it with --model",
        ),
    ],
)
def test_rejects_invalid_configurations(
    draft: Path, geometry: TargetGeometry, changes: dict, message: str
) -> None:
    edit_config(draft, **changes)
    assert message in refusal(draft, geometry)


def test_unknown_fields(draft: Path, geometry: TargetGeometry) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    edit_config(draft, softcap=30.0, eagle_config=layers | {"gate": 1})
    assert read_draft(draft, geometry, strict=False).warnings == (
        "draft config.json: eagle_config: the field gate (1) is unknown and was ignored",
        "draft config.json: the field softcap (30.0) is unknown and was ignored",
    )
    assert "unknown fields gate" in refusal(draft, geometry, strict=True)


EXTRAS = {
    "midlayer.self_attn.q_proj.bias": "biases need attention_bias, qkv_bias or",
    "midlayer.self_attn.q_norm.weight": "only drafts of model_type qwen3 have norms on q and k",
    "layers.2.self_attn.q_proj.weight": "",
    "midlayer.mlp.experts.0.up_proj.weight": "only a dense MLP is supported",
    "input_norm.weight": "there are norms before fc",
    "fc.bias": "",
}


@pytest.mark.parametrize("name", EXTRAS)
def test_rejects_unexpected_tensors(draft: Path, geometry: TargetGeometry, name: str) -> None:
    edit_tensors(draft, lambda t: t.update({name: torch.rand(4)}))
    message = refusal(draft, geometry)
    assert f"left over: {name}, shape [4] F32" in message
    assert EXTRAS[name] in message


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tensor_that_is_missing_or_misshapen_is_named(
    tmp_path_factory, geometry: TargetGeometry, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("draft")
    written = write_draft(path, own_embedding=True, fc_norm=True)
    # Without fc, or with another width of fc, the other tensors have no expected shapes.
    names = sorted(set(written) - {"fc.weight"})
    name = data.draw(st.sampled_from(names))
    gone = data.draw(st.booleans())
    rows = 0 if gone else data.draw(st.integers(1, len(written[name]) - 1))

    def breaking(tensors: dict[str, torch.Tensor]) -> None:
        whole = tensors.pop(name)
        if not gone:
            tensors[name] = whole[:rows].clone()

    edit_tensors(path, breaking)
    optional = {"embed_tokens.weight", "t2d"}
    if gone and name in optional:
        read_draft(path, geometry, strict=True)
        return
    message = refusal(path, geometry)
    assert f"{'missing' if gone else 'wrong shape'}: {name}" in message


def test_missing_tensors_are_listed_together(draft: Path, geometry: TargetGeometry) -> None:
    edit_tensors(draft, lambda t: [t.pop("norm.weight"), t.pop("d2t"), t.pop("lm_head.weight")])
    message = refusal(draft, geometry)
    for line in (
        "3 tensors do not fit",
        "missing: norm.weight, shape [64]",
        "missing: lm_head.weight, shape [128, 64]",
        "missing: d2t, shape [128]",
    ):
        assert line in message


def test_rejects_a_draft_without_fc(draft: Path, geometry: TargetGeometry) -> None:
    edit_tensors(draft, lambda t: t.pop("fc.weight"))
    assert "drafts that read only the target's final state are not" in refusal(draft, geometry)
    edit_tensors(draft, lambda t: [t.pop(n) for n in list(t) if n.startswith("midlayer")])
    assert "not an EAGLE3 draft, it has neither fc.weight nor midlayer.*" in refusal(
        draft, geometry
    )


def test_rejects_a_layer_under_two_names(draft: Path, geometry: TargetGeometry) -> None:
    name = "self_attn.q_proj.weight"
    edit_tensors(draft, lambda t: t.update({f"layers.0.{name}": torch.rand(2, 2)}))
    assert f"layers.0.{name} and midlayer.{name} are the same tensor" in refusal(draft, geometry)


def test_rejects_an_embedding_that_the_draft_does_not_read(
    tmp_path: Path, geometry: TargetGeometry
) -> None:
    write_draft(tmp_path, input_width="hidden", own_embedding=True)
    assert "left over: embed_tokens.weight" in refusal(tmp_path, geometry)


def test_rejects_a_target_as_the_draft(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_target(tmp_path)
    assert "is a GPT-OSS target, not a draft" in refusal(tmp_path, geometry)


def test_rejects_invalid_paths(tmp_path: Path, geometry: TargetGeometry) -> None:
    assert "no such directory" in refusal(tmp_path / "absent", geometry)
    assert "it has no config.json" in refusal(tmp_path, geometry)
