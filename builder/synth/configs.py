"""Fields that configurations of synthetic models share, as the releases spell them."""

from __future__ import annotations

from typing import Any

from specbuild.builder.checkpoint.rope import yarn_attention_factor
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    YarnScaling,
)


def generation_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """The place of the list of EOS tokens."""
    return {
        "do_sample": False,
        "eos_token_id": list(g.eos_token_ids),
        "pad_token_id": pad_token_id,
    }


def yarn_of(rope: Rope) -> YarnScaling:
    """Return the scaling of a rotary embedding with YaRN."""
    assert isinstance(rope.scaling, YarnScaling)
    return rope.scaling


def rope_config(rope: Rope) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a rotary embedding, or None if positions are not scaled."""
    if isinstance(rope.scaling, Llama3Scaling):
        return {
            "factor": rope.scaling.factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_positions,
            "rope_type": "llama3",
        }
    if isinstance(rope.scaling, LinearScaling):
        return {"factor": rope.scaling.factor, "rope_type": "linear"}
    if isinstance(rope.scaling, ProportionalScaling):
        return {
            "factor": rope.scaling.factor,
            "partial_rotary_factor": rope.scaling.share,
            "rope_type": "proportional",
        }
    return None if rope.scaling is None else yarn_config(rope)


def yarn_config(rope: Rope) -> dict[str, Any]:
    """Return ``rope_scaling`` of YaRN."""
    yarn = yarn_of(rope)
    by_default = yarn_attention_factor(yarn.factor)
    own = {} if yarn.attention_factor == by_default else {"attention_factor": yarn.attention_factor}
    return own | {
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_positions,
        "rope_type": "yarn",
        "truncate": yarn.truncate,
    }
