"""Geometries that several tests compare results with."""

from __future__ import annotations

from typing import Any

from specbuild.runtime.engine_dir.feed_forward import ClampedSwiglu, MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm, Rope, TargetGeometry


def gpt_oss_parts(
    layers: int, *, experts: int = 4, top_k: int = 2, inner: int = 32, storage: str = "mxfp4"
) -> dict[str, Any]:
    """Return the fields of a target that describe its layers, as for GPT-OSS."""
    moe = MoeFeedForward(
        experts=experts,
        experts_per_token=top_k,
        inner=inner,
        storage=storage,
        activation=ClampedSwiglu(alpha=1.702, limit=7.0),
        gating="softmax_selected",
        router_bias=True,
        bias=True,
    )
    return {
        "attention": AttentionParts(qkv_bias=True, output_bias=True, sinks=True),
        "norm": Norm(1e-5, "after_weight"),
        "feed_forwards": (moe,),
        "layer_feed_forwards": (0,) * layers,
        "tied_head": False,
    }


# Without YaRN, which these tests do not cover.
GPT_OSS_20B = TargetGeometry(
    model_type="gpt_oss",
    layers=24,
    hidden=2880,
    vocab=201088,
    q_heads=64,
    kv_heads=8,
    head_dim=64,
    layer_types=("sliding_attention", "full_attention") * 12,
    sliding_window=128,
    max_positions=131072,
    rope=Rope(theta=150000.0),
    eos_token_ids=(200002,),
    **gpt_oss_parts(24, experts=32, top_k=4, inner=2880),
)
