"""RoPE fields of configurations, compared with the results of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import (
    describe,
    read_optional_positions,
    read_positions,
    read_rope,
)
from specbuild.builder.families.parts.rope import inverse_frequencies
from specbuild.runtime.engine_dir.geometry import Rope
from specbuild.runtime.engine_dir.rope_scaling import Llama3Scaling, YarnScaling
from specbuild.runtime.errors import SpecbuildError

RELEASE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 128,
    "short_factor": [1.0 + i / 50 for i in range(32)],
    "long_factor": [1.0 + i * i / 40 for i in range(32)],
}  # fmt: skip


def read(fields: dict[str, Any], default_theta: float = 10000.0) -> Rope:
    return read_rope(Config("dir/config.json", "config.json", fields), default_theta=default_theta)


def test_release_values() -> None:
    rope = read({"rope_theta": 150000, "rope_scaling": RELEASE})
    assert rope.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert rope == Rope(
        150000.0,
        YarnScaling(
            factor=32.0, original_max_positions=4096, attention_factor=rope.attention_factor
        ),
    )
    assert read({"rope_parameters": RELEASE | {"rope_theta": 150000.0}}) == rope
    both = {"rope_parameters": RELEASE | {"rope_theta": 150000.0}, "rope_scaling": RELEASE}
    assert read(both | {"rope_theta": 150000.0}) == rope


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 4.0},
        {"truncate": None},
        {"truncate": True, "beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 0.7},
    ],
)
def test_frequencies_and_factor_equal_transformers(changes: dict[str, Any]) -> None:
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = {k: v for k, v in (RELEASE | changes).items() if v is not None}
    config = GptOssConfig(rope_parameters=nested | {"rope_theta": 150000.0})
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rope = read({"rope_theta": 150000.0, "rope_scaling": nested})
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(frequencies(rope, 64), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("longest", [100, 128, 129, 700])
@pytest.mark.parametrize("nested", [DYNAMIC, LONGROPE, LONGROPE | {"factor": 3.0}])
def test_scalings_by_length_equal_transformers(nested: dict[str, Any], longest: int) -> None:
    """Check each of these lengths, as transformers computes frequencies for a sequence of it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = 512 if "short_factor" in nested else 128
    fields = {"rope_theta": 10000.0, "max_position_embeddings": original}
    spelled = {"type": "su" if original == 512 else "dynamic"}
    own = {name: value for name, value in nested.items() if name != "rope_type"}
    rope = read(fields | {"rope_scaling": own | spelled}).up_to(longest)
    parameters = nested | {"rope_theta": 10000.0}
    config = LlamaConfig(
        head_dim=64, rope_parameters=parameters,
        max_position_embeddings=original,
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu", seq_len=longest)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)
    result = inverse_frequencies(rope, 64)
    torch.testing.assert_close(result, expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize(
    "nested",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5},
        RELEASE | {"truncate": True},
    ],
    ids=lambda nested: nested["rope_type"],
)
def test_every_kind_in_every_config_format(nested: dict[str, Any], spelling: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, theta = nested | {"rope_theta": 500000.0}, {"rope_theta": 500000.0}
    renamed = {"type" if key == "rope_type" else key: value for key, value in nested.items()}
    rope = read(
        {
            "rope_type": {"rope_scaling": nested} | theta,
            "type": {"rope_scaling": renamed} | theta,
            "rope_parameters": {"rope_parameters": parameters},
        }[spelling]
    )
    assert rope.kind == ("none" if nested["rope_type"] == "default" else nested["rope_type"])
    for head_dim in (64, 80, 128):
        config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
        if rope.scaling is None:
            expected = LlamaRotaryEmbedding(config).inv_freq
        else:
            expected, _ = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
        result = inverse_frequencies(rope, head_dim)
        torch.testing.assert_close(result, expected.double(), rtol=1e-5, atol=0)


def test_the_original_length_may_be_outside_of_the_scaling() -> None:
    nested = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    fields = {"rope_scaling": nested, "max_position_embeddings": 131072}
    assert read(fields | {"original_max_position_embeddings": 8192}) == read(
        {"rope_scaling": LLAMA3}
    )
    scaling = read(fields).scaling
    assert isinstance(scaling, Llama3Scaling) and scaling.original_max_positions == 131072


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Compute YaRN frequencies by the formula of the paper, from the read fields."""
    yarn = rope.scaling
    assert isinstance(yarn, YarnScaling)
    half = head_dim // 2
    freq = rope.theta ** (torch.arange(half).double() / half)
    bounds = [
        half * math.log(yarn.original_max_positions / (beta * 2 * math.pi)) / math.log(rope.theta)
        for beta in (yarn.beta_fast, yarn.beta_slow)
    ]
    if yarn.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    mask = 1 - ((torch.arange(half).double() - bounds[0]) / (bounds[1] - bounds[0])).clamp(0, 1)
    return mask / freq + (1 - mask) / (yarn.factor * freq)


def test_defaults() -> None:
    assert read({}) == Rope(theta=10000.0)
    assert read({"rope_scaling": None, "rope_parameters": None}, 5.0) == Rope(theta=5.0)
    assert read({"rope_parameters": {"rope_type": "default", "rope_theta": 7}}) == Rope(theta=7.0)
    yarn = read(
        {"rope_scaling": {"type": "yarn", "factor": 2}, "max_position_embeddings": 99}
    ).scaling
    assert isinstance(yarn, YarnScaling)
    assert (yarn.original_max_positions, yarn.truncate) == (99, True)
    assert yarn.attention_factor == pytest.approx(1 + 0.1 * math.log(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 9},
            "the field short_factor is missing",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "long_factor: got .1.0., expected as many numbers as short_factor has, 32",
        ),
        ({"rope_scaling": LONGROPE | {"short_factor": [0.0]}}, "expected positive numbers"),
        ({"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "short_mscale"),
        ({"rope_scaling": {"type": "ntk"}}, r"'ntk' is not implemented \(supported: 'default', '"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}, "max_position_embeddings": 9},
            "the field low_freq_factor is missing",
        ),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
            "high_freq_factor: got 4.0, expected more than low_freq_factor, 4",
        ),
        ({"rope_scaling": RELEASE | {"surplus": 1}}, "what the model computes$"),
        ({"rope_scaling": {"type": "linear"}}, "the field factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "the field factor is missing"),
        ({"rope_scaling": RELEASE | {"mrope_section": [1]}}, "unknown fields mrope_section"),
        ({"rope_scaling": RELEASE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_theta": -1}, "rope_theta: got -1, expected a positive number"),
        (
            {"rope_scaling": RELEASE, "rope_parameters": {"rope_theta": 3.0}},
            "rope_parameters and rope_scaling differ",
        ),
    ],
)
def test_rejects_invalid_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbuildError, match=message):
        read(fields)


def test_description() -> None:
    assert describe(Rope(theta=10000.0)) == "theta 10000 without scaling"
    rope = read({"rope_theta": 150000, "rope_scaling": RELEASE})
    assert describe(rope) == "theta 150000 with YaRN × 32 over 4096"
    linear = read({"rope_scaling": {"type": "linear", "factor": 4}})
    assert describe(linear) == "theta 10000 with linear × 4"


QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
NAMED = {"max_position_embeddings": 40960, "rope_theta": 1e6}
POSITIONS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3's recipe": (NAMED | {"rope_scaling": QWEN}, 131072),
    "in the newer spelling": (NAMED | {"rope_parameters": QWEN}, 131072),
    "by type": (NAMED | {"rope_scaling": {**QWEN, "rope_type": None, "type": "yarn"}}, 131072),
    "original outside": (
        NAMED | {"rope_scaling": {"type": "yarn", "factor": 2.0},
                 "original_max_position_embeddings": 32768},
        65536,
    ),
    "extended in the file": (NAMED | {"max_position_embeddings": 163840, "rope_scaling": QWEN},
                             163840),
    "no original": (NAMED | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 40960),
    "no yarn": (NAMED | {"original_max_position_embeddings": 32768}, 40960),
    "llama3": (NAMED | {"rope_scaling": LLAMA3}, 40960),
    "no more than is stored": (NAMED | {"rope_scaling": QWEN | {"factor": 1e15}}, 2**31 - 1),
}  # fmt: skip


@pytest.mark.parametrize("case", POSITIONS)
def test_maximum_position(case: str) -> None:
    fields, positions = POSITIONS[case]
    config = Config("dir/config.json", "config.json", fields)
    rope = read_rope(config, default_theta=10000.0)
    assert read_positions(config, rope) == positions
    assert read_optional_positions(config, rope) == positions


def test_a_draft_may_state_no_maximum_position() -> None:
    config = Config("dir/config.json", "config.json", {"rope_scaling": QWEN})
    assert read_optional_positions(config, read_rope(config, default_theta=10000.0)) is None
