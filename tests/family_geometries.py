"""The published geometries of supported families and of families that may follow."""

from __future__ import annotations

import math
from typing import Any

from geometries import GPT_OSS_20B

from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    Geglu,
    MoeFeedForward,
    Swiglu,
    distinct_feed_forwards,
)
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    MlaGeometry,
    Multipliers,
    Norm,
    QueryGrowth,
    Rope,
    TargetGeometry,
)
from specbuild.runtime.engine_dir.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


def _dense(inner: int) -> DenseFeedForward:
    return DenseFeedForward(inner=inner, activation=Swiglu())


def _grouped_query(
    model_type: str,
    sizes: tuple[int, int, int, int],
    feed_forward: FeedForward,
    *,
    vocab: int,
    positions: int,
    rope: Rope,
    eps: float,
    eos: tuple[int, ...],
    head_norms: bool = False,
    biased: bool = False,
    head_dim: int = 128,
    tied: bool = False,
    **parts: Any,
) -> TargetGeometry:
    """Return a Llama-like model of ``sizes``: hidden, layers, query heads, KV heads.

    ``parts`` are fields of the geometry that a Llama does not have, or that differ.
    """
    hidden, layers, q_heads, kv_heads = sizes
    fields: dict[str, Any] = {
        "norm": Norm(eps, "before_weight"),
        "attention": AttentionParts(qkv_bias=biased, qk_norm="head" if head_norms else "none"),
        "layer_types": ("full_attention",) * layers,
        "sliding_window": 0,
        "feed_forwards": (feed_forward,),
        "layer_feed_forwards": (0,) * layers,
    }
    return TargetGeometry(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        max_positions=positions,
        tied_head=tied,
        eos_token_ids=eos,
        **(fields | parts),
    )


def _latent(
    model_type: str,
    sizes: tuple[int, int, int],
    mla: MlaGeometry,
    feed_forwards: list[FeedForward],
    *,
    vocab: int,
    positions: int,
    rope: Rope,
    eps: float = 1e-6,
    eos: tuple[int, ...] = (1,),
    tied: bool = False,
) -> TargetGeometry:
    """Return a model with MLA of ``sizes``: hidden, layers, heads."""
    hidden, layers, heads = sizes
    distinct, of_layer = distinct_feed_forwards(feed_forwards)
    return TargetGeometry(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        q_heads=heads,
        kv_heads=1,
        head_dim=mla.entry_width,
        attention=AttentionParts(),
        norm=Norm(eps, "before_weight"),
        rope=rope,
        layer_types=("full_attention",) * layers,
        sliding_window=0,
        feed_forwards=distinct,
        layer_feed_forwards=of_layer,
        max_positions=positions,
        tied_head=tied,
        eos_token_ids=eos,
        latent_dims=(mla.entry_width,) * layers,
        mla=mla,
    )


def _mla(nope: int, value: int, query: int | None, mscale: float = 0.0) -> MlaGeometry:
    factor = (0.1 * mscale * math.log(40) + 1) ** 2
    scale = (nope + 64) ** -0.5 * factor
    return MlaGeometry(512, 64, nope, value, scale, Norm(1e-6, "before_weight"), query)


def _deepseek_rope() -> Rope:
    return Rope(
        10000.0, YarnScaling(factor=40.0, original_max_positions=4096, truncate=True), None, True
    )


def _llama_rope(factor: float) -> Rope:
    return Rope(500000.0, Llama3Scaling(
        factor=factor, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0,
    ))  # fmt: skip


LLAMA_32_1B = _grouped_query(
    "llama", (2048, 16, 32, 8), _dense(8192), vocab=128256, positions=131072, eps=1e-5,
    eos=(128001, 128008, 128009), rope=_llama_rope(32.0), head_dim=64, tied=True,
)  # fmt: skip
LLAMA_31_8B = _grouped_query(
    "llama", (4096, 32, 32, 8), _dense(14336), vocab=128256, positions=131072, eps=1e-5,
    eos=(128001, 128008, 128009), rope=_llama_rope(8.0),
)  # fmt: skip
LLAMA_33_70B = _grouped_query(
    "llama", (8192, 80, 64, 8), _dense(28672), vocab=128256, positions=131072, eps=1e-5,
    eos=(128001, 128008, 128009), rope=_llama_rope(8.0),
)  # fmt: skip
QWEN3_8B = _grouped_query(
    "qwen3", (4096, 36, 32, 8), _dense(12288), vocab=151936, positions=40960, eps=1e-6,
    eos=(151645,), rope=Rope(1e6), head_norms=True,
)  # fmt: skip
QWEN3_32B = _grouped_query(
    "qwen3", (5120, 64, 64, 8), _dense(25600), vocab=151936, positions=40960, eps=1e-6,
    eos=(151645,), rope=Rope(1e6), head_norms=True,
)  # fmt: skip
QWEN3_30B_A3B = _grouped_query(
    "qwen3_moe", (2048, 48, 32, 4),
    MoeFeedForward(
        experts=128, experts_per_token=8, inner=768, storage="bf16", activation=Swiglu(),
        gating="softmax_selected",
    ),
    vocab=151936, positions=40960, eps=1e-6, eos=(151645,), rope=Rope(1e6), head_norms=True,
)  # fmt: skip
MIMO_7B = _grouped_query(
    "mimo", (4096, 36, 32, 8), _dense(11008), vocab=151680, positions=32768, eps=1e-5,
    eos=(151645,), rope=Rope(640000.0), biased=True,
)  # fmt: skip
MISTRAL_SMALL_24B = _grouped_query(
    "mistral", (5120, 40, 32, 8), _dense(32768), vocab=131072, positions=131072, eps=1e-5,
    eos=(2,), rope=Rope(1e9),
)  # fmt: skip
MINISTRAL_3_8B = _grouped_query(
    "ministral3", (4096, 34, 32, 8), _dense(14336), vocab=131072, positions=262144, eps=1e-5,
    eos=(2,),
    rope=Rope(1e6, YarnScaling(factor=16.0, original_max_positions=16384, truncate=True)),
    attention=AttentionParts(query_growth=QueryGrowth(beta=0.1, original_max_positions=16384)),
)  # fmt: skip
MIXTRAL_8X7B = _grouped_query(
    "mixtral", (4096, 32, 32, 8),
    MoeFeedForward(
        experts=8, experts_per_token=2, inner=14336, storage="bf16", activation=Swiglu(),
        gating="softmax_selected",
    ),
    vocab=32000, positions=32768, eps=1e-5, eos=(2,), rope=Rope(1e6),
)  # fmt: skip
SMOLLM3_3B = _grouped_query(
    "smollm3", (2048, 36, 16, 4), _dense(11008), vocab=128256, positions=65536, eps=1e-6,
    eos=(128012,), rope=Rope(5e6), tied=True, unrotated_layers=tuple(range(3, 36, 4)),
)  # fmt: skip
PHI_4 = _grouped_query(
    "phi3", (5120, 40, 40, 10), _dense(17920), vocab=100352, positions=16384, eps=1e-5,
    eos=(100257,), rope=Rope(250000.0),
)  # fmt: skip
_OLMO_NORM = {"norm": Norm(1e-6, "after_weight"), "norm_places": "outputs"}
OLMO_3_7B = _grouped_query(
    "olmo3", (4096, 32, 32, 32), _dense(11008), vocab=100278, positions=65536, eps=1e-6,
    eos=(100257,), attention=AttentionParts(qk_norm="all_heads"),
    rope=Rope(5e5, YarnScaling(
        factor=8.0, original_max_positions=8192, truncate=True,
        attention_factor=0.1 * math.log(8) + 1,
    )),
    layer_types=("sliding_attention", "sliding_attention", "sliding_attention",
                 "full_attention") * 8,
    sliding_window=4096, window_rope=Rope(5e5), **_OLMO_NORM,
)  # fmt: skip
GRANITE_33_8B = _grouped_query(
    "granite", (4096, 40, 32, 8), _dense(12800), vocab=49155, positions=131072, eps=1e-5,
    eos=(0,), rope=Rope(1e7), tied=True, attention=AttentionParts(scale=0.0078125),
    multipliers=Multipliers(embedding=12.0, residual=0.22, logits_divisor=16.0),
)  # fmt: skip
GEMMA_3_27B = _grouped_query(
    "gemma3_text", (5376, 62, 32, 16), _dense(21504), vocab=262208, positions=131072, eps=1e-6,
    eos=(1,), rope=Rope(1e6, LinearScaling(factor=8.0)), tied=True,
    attention=AttentionParts(qk_norm="head", scale=168**-0.5), norm=Norm(1e-6, "after_weight"),
    layer_types=((("sliding_attention",) * 5 + ("full_attention",)) * 11)[:62],
    sliding_window=1024, window_rope=Rope(10000.0), norm_places="both",
    multipliers=Multipliers(embedding=5376**0.5),
    feed_forwards=(DenseFeedForward(inner=21504, activation=Geglu()),),
)  # fmt: skip
GLM_45_AIR = _grouped_query(
    "glm4_moe", (4096, 46, 96, 8), _dense(10944), vocab=151552, positions=131072, eps=1e-5,
    eos=(151329,), rope=Rope(1e6, width=64), biased=True,
    feed_forwards=(_dense(10944), BothFeedForward(
        dense=_dense(1408),
        moe=MoeFeedForward(
            experts=128, experts_per_token=8, inner=1408, storage="bf16", activation=Swiglu(),
            gating="sigmoid_norm", choice_bias=True,
        ),
    )),
    layer_feed_forwards=(0,) + (1,) * 45,
)  # fmt: skip
MINIMAX_M2 = _grouped_query(
    "minimax_m2", (3072, 62, 48, 8),
    MoeFeedForward(
        experts=256, experts_per_token=8, inner=1536, storage="bf16", activation=Swiglu(),
        gating="sigmoid_norm", choice_bias=True,
    ),
    vocab=200064, positions=196608, eps=1e-6, eos=(200020,), rope=Rope(5e6, width=64),
    attention=AttentionParts(qk_norm="all_heads"),
)  # fmt: skip
DEEPSEEK_V2_LITE = _latent(
    "deepseek_v2", (2048, 27, 16), _mla(128, 128, None, mscale=0.707),
    [_dense(10944), *[BothFeedForward(
        dense=_dense(2816),
        moe=MoeFeedForward(
            experts=64, experts_per_token=6, inner=1408, storage="bf16", activation=Swiglu(),
            gating="softmax_topk", group_score="max",
        ),
    )] * 26],
    vocab=102400, positions=163840, rope=_deepseek_rope(), eos=(100001,),
)  # fmt: skip
DEEPSEEK_V3 = _latent(
    "deepseek_v3", (7168, 61, 128), _mla(128, 128, 1536, mscale=1.0),
    [*[_dense(18432)] * 3, *[BothFeedForward(
        dense=_dense(2048),
        moe=MoeFeedForward(
            experts=256, experts_per_token=8, inner=2048, storage="fp8", activation=Swiglu(),
            gating="sigmoid_norm", choice_bias=True, groups=8, groups_chosen=4, scaling=2.5,
        ),
    )] * 58],
    vocab=129280, positions=163840, rope=_deepseek_rope(),
)  # fmt: skip
GLM_47_FLASH = _latent(
    "glm4_moe_lite", (2048, 47, 20), _mla(192, 256, 768),
    [_dense(10240), *[BothFeedForward(
        dense=_dense(1536),
        moe=MoeFeedForward(
            experts=64, experts_per_token=4, inner=1536, storage="bf16", activation=Swiglu(),
            gating="sigmoid_norm", choice_bias=True, scaling=1.8,
        ),
    )] * 46],
    vocab=154880, positions=202752, rope=Rope(1e6, None, None, True), eps=1e-5,
)  # fmt: skip
YOUTU_2B = _latent(
    "youtu", (2048, 32, 16), _mla(128, 128, 1536), [_dense(6144)] * 32, vocab=128256,
    positions=131072, rope=Rope(1.6e6, None, None, True), eos=(128001,), tied=True,
)  # fmt: skip

# By name: the geometry and its published parameters, in billions.
FAMILIES: dict[str, tuple[TargetGeometry, float]] = {
    "GPT-OSS-20B": (GPT_OSS_20B, 20.91),
    "Llama-3.2-1B": (LLAMA_32_1B, 1.24),
    "Llama-3.1-8B": (LLAMA_31_8B, 8.03),
    "Llama-3.3-70B": (LLAMA_33_70B, 70.55),
    "Qwen3-8B": (QWEN3_8B, 8.19),
    "Qwen3-32B": (QWEN3_32B, 32.76),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.53),
    # 7.83 are published, 0.21 of them the MTP layer's.
    "MiMo-7B": (MIMO_7B, 7.62),
    "Mistral-Small-24B": (MISTRAL_SMALL_24B, 23.57),
    "Ministral-3-8B": (MINISTRAL_3_8B, 8.49),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.7),
    "SmolLM3-3B": (SMOLLM3_3B, 3.08),
    "Phi-4": (PHI_4, 14.66),
    "OLMo-3-7B": (OLMO_3_7B, 7.30),
    "Granite-3.3-8B": (GRANITE_33_8B, 8.17),
    "Gemma-3-27B": (GEMMA_3_27B, 27.01),
    # Published as 106, without the MTP layer.
    "GLM-4.5-Air": (GLM_45_AIR, 106.85),
    "MiniMax-M2": (MINIMAX_M2, 228.7),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.71),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.0),
    "GLM-4.7-Flash": (GLM_47_FLASH, 29.94),
    "Youtu-LLM-2B": (YOUTU_2B, 1.96),
}
