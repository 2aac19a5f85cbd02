"""Geometries that several tests hold something against."""

from __future__ import annotations

from specbuild.runtime.engine_dir.manifest import Rope, TargetGeometry

# Without YaRN, which none of these tests is about.
GPT_OSS_20B = TargetGeometry(
    model_type="gpt_oss",
    layers=24,
    hidden=2880,
    vocab=201088,
    q_heads=64,
    kv_heads=8,
    head_dim=64,
    experts=32,
    experts_per_token=4,
    expert_inner=2880,
    expert_format="mxfp4",
    layer_types=("sliding_attention", "full_attention") * 12,
    sliding_window=128,
    max_positions=131072,
    rms_eps=1e-5,
    swiglu_limit=7.0,
    rope=Rope(theta=150000.0),
    eos_token_ids=(200002,),
)
