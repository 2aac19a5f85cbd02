"""DeepSeek-V3 checkpoints: geometry, converted tensors, and rejected configurations."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors, remove_fields
from deepseek_checkpoints import HIDDEN, LAYERS, SIZES, write_deepseek
from engine_sizes import compute_engine_sizes
from safetensors.torch import load_file

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.tensorrt.standard.check import require_standard_support
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions, SpecPvOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.mla import retrofit_mla
from specbuild.runtime.engine_dir.feed_forward import BothFeedForward, DenseFeedForward, Swiglu
from specbuild.runtime.errors import SpecbuildError

RANK, ROPE, NOPE, VALUE, HEADS = 32, 16, 24, 20, 4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek") / "model"
    write_deepseek(path)
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    """A copy that the test may edit."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def refusal(path: Path, **options: bool) -> str:
    with pytest.raises(SpecbuildError) as error:
        read_target(path, **({"strict": False} | options))
    return str(error.value)


def test_geometry(written: Path) -> None:
    checkpoint = read_target(written, strict=True)
    assert checkpoint.warnings == ()
    g = checkpoint.geometry
    assert (g.q_heads, g.kv_heads, g.head_dim) == (HEADS, 1, RANK + ROPE)
    assert g.latent_dims == (RANK + ROPE,) * LAYERS
    assert g.moe is not None
    assert (g.moe.experts, g.moe.experts_per_token, g.moe.inner) == (8, 3, 24)
    assert (g.moe.storage, g.moe.activation) == ("bf16", Swiglu())
    assert (g.rope.interleaved, g.norm.rounding) == (True, "before_weight")
    assert g.mla is not None and g.mla.q_lora_rank == 24
    # YaRN: the ratio of both factors scales cos and sin, and the square of one scales the scores.
    both, alone = 0.1 * math.log(4) + 1, 0.1 * 0.8 * math.log(4) + 1
    assert g.rope.attention_factor == pytest.approx(both / alone)
    assert g.mla.scale == pytest.approx((NOPE + ROPE) ** -0.5 * alone**2)
    assert g.layer_feed_forwards == (0, *[1] * (LAYERS - 1))
    assert g.feed_forwards == (
        DenseFeedForward(inner=96, activation=Swiglu()),
        BothFeedForward(dense=DenseFeedForward(inner=48, activation=Swiglu()), moe=g.moe),
    )
    chosen = (g.moe.groups, g.moe.groups_chosen, g.moe.group_score)
    assert chosen == (4, 2, "sum_of_two")
    assert (g.moe.gating, g.moe.choice_bias, g.moe.scaling) == ("sigmoid_norm", True, 2.5)


def stored(path: Path, checkpoint: TargetCheckpoint, name: str) -> tuple[torch.Tensor, ...]:
    source = checkpoint.tensors[name]
    loaded = source.load()
    assert tuple(loaded.shape) == source.shape and loaded.dtype == torch.float32
    return loaded, *(load_file(path / "model.safetensors")[name] for name in source.sources)


def test_up_projections_are_split(written: Path) -> None:
    checkpoint = read_target(written, strict=True)
    prefix = "model.layers.1.self_attn.kv_b_proj."
    key, whole = stored(written, checkpoint, f"{prefix}key")
    value, _ = stored(written, checkpoint, f"{prefix}value")
    for head in range(HEADS):
        rows = whole[head * (NOPE + VALUE) : (head + 1) * (NOPE + VALUE)]
        assert torch.equal(key[head], rows[:NOPE]) and torch.equal(value[head], rows[NOPE:])


@pytest.mark.parametrize(("name", "heads"), [("q_b_proj", HEADS), ("kv_a_proj_with_mqa", 1)])
def test_interleaved_rotated_rows_are_split_into_halves(
    written: Path, name: str, heads: int
) -> None:
    checkpoint = read_target(written, strict=True)
    loaded, disk = stored(written, checkpoint, f"model.layers.0.self_attn.{name}.weight")
    width = len(disk) // heads
    for head in range(heads):
        first_rotated = head * width + width - ROPE
        assert torch.equal(loaded[head * width : first_rotated], disk[head * width : first_rotated])
        for pair in range(ROPE // 2):
            assert torch.equal(loaded[first_rotated + pair], disk[first_rotated + 2 * pair])
            assert torch.equal(
                loaded[first_rotated + ROPE // 2 + pair], disk[first_rotated + 2 * pair + 1]
            )


def test_rotated_rows_in_halves_are_unchanged(model: Path) -> None:
    edit_config(model, rope_interleave=False)
    checkpoint = read_target(model, strict=True)
    loaded, disk = stored(model, checkpoint, "model.layers.0.self_attn.q_b_proj.weight")
    assert torch.equal(loaded, disk)


def test_experts_are_stacked(written: Path) -> None:
    checkpoint = read_target(written, strict=True)
    prefix = "model.layers.1.mlp.experts."
    assert not any(".mlp.experts.0." in name for name in checkpoint.tensors)
    gate_up, *inner = stored(written, checkpoint, f"{prefix}gate_up_proj")
    down, *outer = stored(written, checkpoint, f"{prefix}down_proj")
    assert gate_up.shape == (8, HIDDEN, 48) and down.shape == (8, 24, HIDDEN)
    for expert in range(8):
        assert torch.equal(gate_up[expert, :, 0::2], inner[2 * expert].T)
        assert torch.equal(gate_up[expert, :, 1::2], inner[2 * expert + 1].T)
        assert torch.equal(down[expert], outer[expert].T)


def test_rejects_a_dense_config_with_expert_tensors(model: Path) -> None:
    edit_config(model, first_k_dense_replace=LAYERS)
    message = refusal(model)
    assert "missing: model.layers.1.mlp.down_proj.weight" in message
    assert "left over: model.layers.1.mlp.experts.0.down_proj.weight" in message
    assert "hint: config.json says that layers 1 have a dense MLP" in message
    assert "the shards hold mlp.experts.* there" in message
    edit_config(model, first_k_dense_replace=1, n_routed_experts=None)
    assert "layers 1 have a dense MLP" in refusal(model)


def test_rejects_a_config_of_experts_with_dense_tensors(model: Path) -> None:
    edit_config(model, first_k_dense_replace=0)
    message = refusal(model)
    assert "hint: config.json says that layers 0 have experts" in message
    assert "hold a dense mlp.gate_proj there" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": 16}, "the shards hold 8 experts, config.json says 16"),
        ({"moe_intermediate_size": 48}, "wrong shape: model.layers.1.mlp.experts.0.down_proj"),
        ({"n_shared_experts": 1}, "wrong shape: model.layers.1.mlp.shared_experts.down_proj"),
        ({"n_shared_experts": 0}, "left over: model.layers.1.mlp.shared_experts.down_proj"),
        ({"intermediate_size": 64}, "wrong shape: model.layers.0.mlp.down_proj.weight"),
        ({"kv_lora_rank": 48}, "got [176, 32], expected [176, 48]"),
        ({"q_lora_rank": None}, "missing: model.layers.{0-1}.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 3}, "the shards hold 2 layers, config.json says 3"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: got 2, expected as many as"),
        ({"n_group": 3}, "8 experts are not a multiple of n_group 3"),
        ({"topk_group": 5}, "topk_group 5 of n_group 4"),
        ({"n_group": 8}, "n_group 8 leaves one expert per group, expected two or more"),
        (
            {"num_experts_per_tok": 5},
            "5 experts per token, but the 2 groups of a token",
        ),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not implemented"),
        ({"attention_bias": True}, "attention_bias True is not implemented"),
        ({"quantization_config": {"quant_method": "fp8"}}, "no tensor is stored quantized"),
        ({"architectures": ["Other"]}, "architectures ['Other'] is not supported"),
    ],
)
def test_rejects_unsupported_configs(model: Path, changes: dict, message: str) -> None:
    edit_config(model, **changes)
    assert message in refusal(model)


def test_mtp_layers_are_reported(model: Path) -> None:
    edit_tensors(
        model, lambda t: t.update({f"model.layers.{LAYERS}.eh_proj.weight": torch.randn(4, 8)})
    )
    warning = f"layer {LAYERS} predicts further tokens"
    checkpoint = read_target(model, strict=True)
    assert warning in checkpoint.warnings[0] and "1 tensors" in checkpoint.warnings[0]
    assert not any(f"layers.{LAYERS}." in name for name in checkpoint.tensors)
    remove_fields(model, "num_nextn_predict_layers")
    assert f"left over: model.layers.{LAYERS}.eh_proj.weight" in refusal(model)
    edit_config(model, num_mtp_layers=1)  # transformers' newer name
    assert warning in read_target(model, strict=True).warnings[0]
    edit_config(model, num_mtp_layers=0)
    assert f"left over: model.layers.{LAYERS}.eh_proj.weight" in refusal(model)


def test_rejects_a_llama_config_with_these_tensors(model: Path) -> None:
    edit_config(model, model_type="llama", architectures=["LlamaForCausalLM"])
    message = refusal(model)
    assert "missing: model.layers.{0-1}.self_attn.k_proj.weight" in message
    assert "dense MLP, but the shards hold mlp.experts.*" in message
    assert "MLA attention, which needs a config.json of model_type" in message


def test_rejects_options_of_gpt_oss(model: Path, tmp_path: Path) -> None:
    assert "--dsa: indexers" in refusal(model, dsa=True)
    options = BuildOptions(model=model, output=tmp_path / "e", specpv=SpecPvOptions(enabled=True))
    geometry = read_target(model, strict=True).geometry
    with pytest.raises(SpecbuildError, match="blocks are chosen by cached keys"):
        compute_engine_sizes(options, geometry, None)
    with pytest.raises(
        SpecbuildError, match="already caches latents; retrofit mla supports only gpt"
    ):
        retrofit_mla(LatentOptions(model=model, rank=8), SilentProgress())
    with pytest.raises(SpecbuildError, match="size of shared experts is 48, but CUDA kernels"):
        require_cuda_support(geometry, None)
    with pytest.raises(
        SpecbuildError, match=r"whose attention \(MLA\) TensorRT-RTX does not support"
    ):
        require_standard_support(geometry, None, options)
    (model / "mla_kv.safetensors").write_bytes(b"")
    assert "need gpt_oss, but this is a deepseek_v3, which caches native latents" in refusal(model)
    assert read_target(model, strict=True, mla=False).geometry == geometry


def test_the_written_config_has_the_requested_values(written: Path) -> None:
    """Check the fixture itself: transformers renames and moves fields between versions."""
    config = json.loads((written / "config.json").read_text())
    assert {name: config[name] for name in SIZES} == SIZES


def test_rotated_rows_are_interleaved_by_default(tmp_path: Path) -> None:
    """DeepSeek-V3's own config.json has no rope_interleave."""
    write_deepseek(tmp_path)
    name = "model.layers.0.self_attn.q_b_proj.weight"
    edit_config(tmp_path, rope_interleave=True)
    message = read_target(tmp_path, strict=True).tensors[name].load()
    remove_fields(tmp_path, "rope_interleave")
    unsaid = read_target(tmp_path, strict=True).tensors[name].load()
    assert torch.equal(unsaid, message)
    edit_config(tmp_path, rope_interleave=False)
    assert not torch.equal(read_target(tmp_path, strict=True).tensors[name].load(), message)
