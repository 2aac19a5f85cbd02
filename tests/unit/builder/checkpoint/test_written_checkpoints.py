"""The checkpoints that these tests write are valid: transformers loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_target

from specbuild.builder.checkpoint.mxfp4 import dequantise
from specbuild.builder.families.checkpoints import read_target


@pytest.mark.parametrize(
    ("experts_format", "dtype", "rope_spelling"),
    [
        ("mxfp4", "bf16", "rope_parameters"),
        ("bf16", "bf16", "rope_scaling"),
        ("bf16", "f32", "rope_parameters"),
    ],
)
def test_transformers_loads_written_checkpoints(
    tmp_path: Path, experts_format: str, dtype: str, rope_spelling: str
) -> None:
    from transformers import GptOssForCausalLM

    written = write_target(
        tmp_path, experts_format=experts_format, dtype=dtype, rope_spelling=rope_spelling, shards=2
    )
    model, report = GptOssForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    geometry = read_target(tmp_path, strict=True).geometry
    assert list(geometry.layer_types) == model.config.layer_types
    assert list(geometry.eos_token_ids) == model.generation_config.eos_token_id
    assert geometry.rope.attention_factor == pytest.approx(model.model.rotary_emb.attention_scaling)
    loaded = model.state_dict()
    for name in ("model.layers.1.self_attn.sinks", "lm_head.weight"):
        assert torch.equal(loaded[name].float(), written[name].float())
    experts = "model.layers.3.mlp.experts.gate_up_proj"
    if experts_format == "mxfp4":
        expected = dequantise(written[f"{experts}_blocks"], written[f"{experts}_scales"])
        assert torch.equal(loaded[experts].float(), expected.transpose(1, 2))
    ids = torch.randint(0, geometry.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        result = model(ids, output_hidden_states=True)
    spreads = [float(state.std()) for state in result.hidden_states]
    assert all(0.3 < spread < 10 for spread in spreads), spreads
    best = result.logits.softmax(-1).amax(-1)
    assert 0.05 < float(best.mean()) < 0.9  # neither uniform nor deterministic


def test_seeds_determine_the_weights(tmp_path: Path) -> None:
    one = write_target(tmp_path / "a", seed=3)
    same = write_target(tmp_path / "b", seed=3)
    other = write_target(tmp_path / "c", seed=4)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    files = [tmp_path / folder / "model.safetensors" for folder in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
