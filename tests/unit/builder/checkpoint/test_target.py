"""GPT-OSS checkpoints: the values read from them, and rejected checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import SPECIAL_TOKENS, edit_config, edit_tensors, remove_fields, write_json
from checkpoints import write_draft, write_target
from geometries import GPT_OSS_20B
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.families.gpt_oss.geometry import experts_of
from specbuild.builder.families.gpt_oss.tensors import target_tensors
from specbuild.runtime.engine_dir.feed_forward import ClampedSwiglu, MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm
from specbuild.runtime.errors import SpecbuildError

SMALL = {"layers": 2, "hidden": 32, "experts": 2, "experts_per_token": 1, "vocab": 40}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    write_target(path, **SMALL)
    return path


def refusal(path: Path, *, strict: bool = False) -> str:
    with pytest.raises(SpecbuildError) as caught:
        read_target(path, strict=strict)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("experts_format", ["mxfp4", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_and_geometry(tmp_path: Path, dtype: str, experts_format: str, shards: int) -> None:
    written = write_target(
        tmp_path, dtype=dtype, experts_format=experts_format, shards=shards, head_dim=32
    )
    checkpoint = read_target(tmp_path, strict=True)
    assert checkpoint.warnings == ()
    assert set(checkpoint.tensors) == set(written)
    assert all(torch.equal(checkpoint.tensors[n].load(), t) for n, t in written.items())
    g = checkpoint.geometry
    assert (g.layers, g.hidden, g.vocab, g.q_heads, g.kv_heads, g.head_dim) == (
        4,
        64,
        256,
        4,
        2,
        32,
    )
    assert g.layer_feed_forwards == (0,) * g.layers
    assert g.feed_forwards == (
        MoeFeedForward(
            experts=4,
            experts_per_token=2,
            inner=32,
            storage=experts_format,
            activation=ClampedSwiglu(alpha=1.702, limit=7.0),
            gating="softmax_selected",
            router_bias=True,
            bias=True,
        ),
    )
    assert g.eos_token_ids == (0, 2)
    assert (g.max_positions, g.sliding_window) == (512, 8)
    assert g.norm == Norm(1e-5, "after_weight")
    assert g.attention == AttentionParts(qkv_bias=True, output_bias=True, sinks=True)


def test_expected_tensors_of_the_20b_release() -> None:
    g = GPT_OSS_20B
    expected = target_tensors(g)
    layer = "model.layers.23."
    assert expected[f"{layer}self_attn.q_proj.weight"].shape == (4096, 2880)
    assert expected[f"{layer}self_attn.k_proj.bias"].shape == (512,)
    assert expected[f"{layer}mlp.experts.gate_up_proj_blocks"].shape == (32, 5760, 90, 16)
    assert expected[f"{layer}mlp.experts.down_proj_scales"].shape == (32, 2880, 90)
    assert expected[f"{layer}mlp.experts.down_proj_scales"].dtypes == ("U8",)
    assert len(expected) == 3 + 24 * 19


def test_layer_types_alternate_by_default(target: Path) -> None:
    remove_fields(target, "layer_types")
    g = read_target(target, strict=True).geometry
    assert g.layer_types == ("sliding_attention", "full_attention")
    edit_config(target, layer_types=["full_attention", "full_attention"], sliding_window=None)
    g = read_target(target, strict=True).geometry
    assert (g.layer_types, g.sliding_window) == (("full_attention", "full_attention"), 0)


def test_the_eos_of_config_is_used_without_generation_config_only(target: Path) -> None:
    edit_config(target, eos_token_id=7)
    assert read_target(target, strict=True).geometry.eos_token_ids == (0, 2)
    write_json(target / "generation_config.json", {"eos_token_id": 5})
    assert read_target(target, strict=True).geometry.eos_token_ids == (5,)
    write_json(target / "generation_config.json", {"do_sample": True})
    assert read_target(target, strict=True).geometry.eos_token_ids == (7,)
    (target / "generation_config.json").unlink()
    assert read_target(target, strict=True).geometry.eos_token_ids == (7,)
    remove_fields(target, "eos_token_id")
    checkpoint = read_target(target, strict=True)
    assert checkpoint.geometry.eos_token_ids == ()
    assert checkpoint.warnings == (
        "target: no EOS token is defined; output ends only at its maximum length",
    )


def test_text_files(tmp_path: Path) -> None:
    write_target(tmp_path, vocab=300, tokenizer=True, chat_template="{{ messages }}")
    files = read_target(tmp_path, strict=True).text_files
    assert [file.name for file in files] == [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files[0]))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.decode(tokenizer.encode("def naïve(🙂):").ids) == "def naïve(🙂):"


def test_no_text_files(target: Path) -> None:
    assert read_target(target, strict=True).text_files == ()


def test_tied_head_is_the_embedding(target: Path) -> None:
    edit_config(target, tie_word_embeddings=True)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(target)
    edit_tensors(target, lambda t: t.pop("lm_head.weight"))
    tensors = read_target(target, strict=True).tensors
    assert tensors["lm_head.weight"].sources == ("model.embed_tokens.weight",)
    assert torch.equal(
        tensors["lm_head.weight"].load(), tensors["model.embed_tokens.weight"].load()
    )
    edit_tensors(
        target, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    tensors = read_target(target, strict=True).tensors
    assert tensors["lm_head.weight"].sources == ("model.embed_tokens.weight",)


def test_rejects_a_missing_head_without_tying(target: Path) -> None:
    edit_tensors(target, lambda t: t.pop("lm_head.weight"))
    assert "missing: lm_head.weight, shape [40, 32]" in refusal(target)


@examples(50)
@given(data=st.data())
def test_the_error_names_any_changed_tensor(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("changed")
    written = write_target(path, **SMALL)
    names = data.draw(
        st.lists(st.sampled_from(sorted(written)), min_size=1, max_size=4, unique=True)
    )
    kinds = {name: data.draw(st.sampled_from(sorted(CHANGES))) for name in names}
    edit_tensors(path, lambda tensors: [CHANGES[k][0](tensors, n) for n, k in kinds.items()])
    message = refusal(path)
    for name, kind in kinds.items():
        finding = CHANGES[kind][1]
        lines = [line for line in message.splitlines() if line.startswith(f"  {finding}: ")]
        assert any(stands_for(line.split(": ")[1], name, kind) for line in lines), message
    findings = [line for line in message.splitlines()[1:] if not line.startswith("  hint")]
    assert 0 < len(findings) <= 2 * len(names)


def remove(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def reshape(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def retype(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].double()


def add(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f"{name}_extra"] = torch.rand(3)


CHANGES = {
    "remove": (remove, "missing"),
    "reshape": (reshape, "wrong shape"),
    "retype": (retype, "wrong dtype"),
    "add": (add, "left over"),
}


def stands_for(group: str, name: str, kind: str) -> bool:
    """Return whether a reported name or group (``layers.{0-1}.``) includes ``name``."""
    expected = f"{name}_extra" if kind == "add" else name
    pattern = group.split(", shape", maxsplit=1)[0]
    choices = [pattern.replace("{0-1}", str(layer)) for layer in range(2)]
    return expected in choices


def test_rejects_more_layers_in_the_shards_than_in_the_config(target: Path) -> None:
    edit_config(target, num_hidden_layers=1, layer_types=None)
    message = refusal(target)
    assert "left over: model.layers.1.mlp.router.bias" in message
    assert "hint: the shards hold 2 layers, config.json says 1" in message


def test_findings_of_many_layers_share_a_line(tmp_path: Path) -> None:
    write_target(tmp_path, layers=6)
    edit_tensors(
        tmp_path,
        lambda t: [t.pop(f"model.layers.{i}.self_attn.sinks") for i in (0, 1, 2, 3, 5)],
    )
    message = refusal(tmp_path)
    assert "5 tensors do not fit the model" in message
    assert "missing: model.layers.{0-3,5}.self_attn.sinks, shape [4]" in message


@pytest.mark.parametrize("written", ["mxfp4", "bf16"])
def test_rejects_different_expert_formats_in_config_and_shards(
    tmp_path: Path, written: str
) -> None:
    write_target(tmp_path, experts_format=written)
    if written == "mxfp4":
        remove_fields(tmp_path, "quantization_config")
        hint = "the shards hold MXFP4 experts, but config.json has no quantization_config"
    else:
        edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
        hint = "config.json says MXFP4, but the shards hold dense experts"
    message = refusal(tmp_path)
    assert f"hint: {hint}" in message
    assert "missing: model.layers.{0-3}.mlp.experts.down_proj" in message
    assert "left over: model.layers.{0-3}.mlp.experts.gate_up_proj" in message


MLA_CONFIG = {
    "architectures": ["LlamaMLAForCausalLM"],
    "model_type": "llama_mla",
    "num_local_experts": None,
    "num_experts_per_tok": None,
    "experts_per_token": None,
    "quantization_config": None,
    "router_aux_loss_coef": None,
}


@pytest.mark.parametrize("model_type", ["llama_mla", "gpt_oss"])
@pytest.mark.parametrize("stray", [None, 4])
def test_rejects_a_dense_config_with_tensors_of_experts(
    tmp_path: Path, model_type: str, stray: int | None
) -> None:
    changes = {"model_type": model_type, "num_local_experts": stray}
    write_target(tmp_path, config_changes=MLA_CONFIG | changes)
    latent = torch.rand(4, 64)
    edit_tensors(
        tmp_path, lambda t: t.update({"model.layers.0.self_attn.kv_a_proj.weight": latent})
    )
    message = refusal(tmp_path)
    assert "the shards hold MLA attention" in message
    assert "is not supported (supported: gpt_oss (GptOssForCausalLM), " in message
    assert "LlamaMLAForCausalLM with a dense MLP" in message
    assert "the shards hold mlp.experts.* and mlp.router.*" in message


def test_rejects_dense_tensors_with_a_gpt_oss_config(target: Path) -> None:
    def densify(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".mlp." in n]:
            del tensors[name]
        for layer in range(2):
            tensors[f"model.layers.{layer}.mlp.gate_proj.weight"] = torch.rand(32, 32)

    edit_tensors(target, densify)
    message = refusal(target)
    assert "left over: model.layers.{0-1}.mlp.gate_proj.weight" in message
    assert "hint: the shards hold a dense MLP, but GPT-OSS has experts" in message


def test_rejects_a_draft_as_the_target(tmp_path: Path) -> None:
    write_draft(tmp_path)
    message = refusal(tmp_path)
    assert "architectures ['LlamaForCausalLMEagle3'] is not supported" in message
    assert "hint: the shards contain an EAGLE3 draft; pass it with --draft" in message


def test_rejects_an_unsupported_model_type_without_weights(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "mamba"})
    assert "model_type 'mamba' is not supported (supported: gpt_oss" in refusal(tmp_path)
    write_json(tmp_path / "config.json", {})
    assert "model_type None is not supported" in refusal(tmp_path)


def test_rejects_pickled_weights(target: Path) -> None:
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    assert "only pickle weights (pytorch_model.bin)" in refusal(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "the field hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size: got '64', expected a whole number of 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, expected a whole number"),
        ({"vocab_size": True}, "vocab_size: got True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: got 0, expected a positive number"),
        ({"layer_types": ["full_attention"]}, "layer_types: got"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "expected 2 of sliding_attention",
        ),
        ({"sliding_window": None}, "the field sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window: got 0"),
        ({"attention_bias": False}, "left over: model.layers.{0-1}.self_attn.k_proj.bias, shape"),
        ({"attention_bias": "no"}, "attention_bias: got 'no', expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented (supported: 'silu')"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 KV heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok: got 2, expected the value of"),
        (
            {"num_experts_per_tok": 3, "experts_per_token": 3},
            "3 experts per token, but only 2 experts",
        ),
        ({"hidden_size": 48}, "MXFP4 needs multiples of 32, got hidden_size 48"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method: got 'gptq'"),
        ({"quantization_config": {"bits": 4, "quant_method": "mxfp4"}}, None),
        ({"quantization_config": 4}, "quantization_config: got 4, expected an object"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type 'ntk' is not implemented"),
        (
            {"rope_scaling": None, "rope_parameters": None},
            "neither rope_parameters nor rope_scaling",
        ),
    ],
)
def test_rejects_invalid_configurations(target: Path, changes: dict, message: str | None) -> None:
    edit_config(target, **changes)
    if message is None:
        warnings = read_target(target, strict=False).warnings
        assert any("bits (4) is unknown" in warning for warning in warnings)
        message = "unknown fields bits"
        assert message in refusal(target, strict=True)
    else:
        assert message in refusal(target)


def test_rejects_an_eos_outside_the_vocabulary(target: Path) -> None:
    write_json(target / "generation_config.json", {"eos_token_id": [1, 40]})
    assert "generation_config.json: eos_token_id: got [1, 40]" in refusal(target)


def test_an_unknown_field_is_a_warning_or_with_strict_an_error(target: Path) -> None:
    edit_config(target, attention_temperature=2.0, resid_dropout=0.0)
    (warning,) = read_target(target, strict=False).warnings
    assert warning == (
        "target config.json: the field attention_temperature (2.0) is unknown and was ignored"
    )
    assert "unknown fields attention_temperature" in refusal(target, strict=True)


def test_warnings_contain_no_path(target: Path) -> None:
    edit_config(target, mystery=str(1), attention_dropout=0.1)
    warnings = read_target(target, strict=False).warnings
    assert len(warnings) == 2
    assert not any(str(target.parent) in warning for warning in warnings)


def test_rejects_a_truncated_shard(target: Path) -> None:
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated or damaged" in refusal(target)


def test_reading_does_not_change_the_checkpoint(target: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    shutil.copytree(target, before)
    for tensor in read_target(target, strict=True).tensors.values():
        tensor.load()
    for file in before.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    assert {f.name for f in before.iterdir()} == {f.name for f in target.iterdir()}


def test_a_token_may_use_every_expert(tmp_path: Path) -> None:
    write_target(tmp_path, layers=2, experts=2, experts_per_token=2)
    assert experts_of(read_target(tmp_path, strict=True).geometry).experts_per_token == 2


def test_rejects_mxfp4_inner_sizes_with_partial_blocks(tmp_path: Path) -> None:
    write_target(tmp_path, layers=2)
    edit_config(tmp_path, intermediate_size=48)
    with pytest.raises(
        SpecbuildError, match=r"MXFP4 needs multiples of 32, .* intermediate_size 48"
    ):
        read_target(tmp_path, strict=True)
