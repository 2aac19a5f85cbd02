"""Reads the sizes of MLA from a configuration of DeepSeek's models."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import yarn_score_factor
from specbuild.runtime.engine_dir.geometry import MlaGeometry, Norm, Rope

LATENT_EPS = 1e-6  # for the norms of latents, independent of rms_norm_eps
MLA_FIELDS = frozenset(
    {
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "v_head_dim",
    }
)


def read_mla(config: Config, rope: Rope) -> MlaGeometry:
    """Read the geometry. SpecbuildError for a missing size, or an odd rotated width."""
    rope_dim, nope_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    if rope_dim % 2:
        raise config.wrong("qk_rope_head_dim", "an even number, because RoPE rotates pairs")
    return MlaGeometry(
        kv_lora_rank=config.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_score_factor(config, rope),
        norm=Norm(LATENT_EPS, "before_weight"),
        q_lora_rank=config.optional_integer("q_lora_rank"),
    )
