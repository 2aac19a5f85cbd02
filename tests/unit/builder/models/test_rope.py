"""Rotary tables against transformers' own YaRN, and against GPT-OSS's published constants."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specbuild.builder.families.parts.rope import inverse_frequencies, rope_tables
from specbuild.runtime.engine_dir.geometry import Rope
from specbuild.runtime.engine_dir.rope_scaling import Llama3Scaling, YarnScaling

YARN = Rope(
    150000.0,
    YarnScaling(factor=32.0, original_max_positions=4096, attention_factor=1.3465735902799727),
)


def test_yarn_equals_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = GptOssConfig(
        head_dim=64,
        hidden_size=64 * 4,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(YARN, 64).float(), expected, rtol=1e-6, atol=0)
    assert abs(factor - YARN.attention_factor) < 1e-6


def test_llama3_equals_transformers() -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, head_dim=128, max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    scaling = Llama3Scaling(
        factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    result = inverse_frequencies(Rope(500000.0, scaling), 128)
    torch.testing.assert_close(result.float(), expected, rtol=1e-6, atol=0)
    assert factor == 1.0


def test_gpt_oss_ramp_bounds() -> None:
    """Channels up to 8 keep their frequency; those from 18 on are divided by 32."""
    plain = inverse_frequencies(Rope(theta=150000.0), 64)
    ratio = plain / inverse_frequencies(YARN, 64)
    torch.testing.assert_close(ratio[:9], torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(ratio[18:], torch.full((14,), 32.0, dtype=torch.float64))
    assert (ratio[9:18].diff() > 0).all()


def test_tables_include_the_attention_factor() -> None:
    cos, sin = rope_tables(YARN, 64, 100)
    torch.testing.assert_close(
        cos**2 + sin**2, torch.full((100, 32), YARN.attention_factor**2), rtol=1e-5, atol=0
    )


def test_the_ramp_may_end_past_the_last_channel() -> None:
    """With a long original context and a small theta, every channel rotates more than once."""
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": True,
                  "original_max_position_embeddings": 131072}  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=4 * 131072,
        rope_parameters=parameters,
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    rope = Rope(10000.0, YarnScaling(factor=4.0, original_max_positions=131072, truncate=True))
    torch.testing.assert_close(inverse_frequencies(rope, 64).float(), expected, rtol=1e-6, atol=0)
