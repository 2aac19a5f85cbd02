"""Synthetic models with DeepSeek's attention: named geometries, configs, and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbuild.builder.checkpoint.rope import yarn_attention_factor
from specbuild.builder.families.deepseek.variants import VARIANTS
from specbuild.builder.families.family import DraftSizes, NamedGeometry, SynthTarget
from specbuild.builder.families.parts.mla_config import LATENT_EPS
from specbuild.builder.families.parts.synth_layer import layer_tensor
from specbuild.builder.synth.configs import rope_config
from specbuild.builder.synth.fill import Fill
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    MoeFeedForward,
    Swiglu,
    distinct_feed_forwards,
)
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    MlaGeometry,
    Norm,
    Rope,
    TargetGeometry,
)
from specbuild.runtime.engine_dir.rope_scaling import YarnScaling

# The value of DeepSeek-V2; DeepSeek-V3 has 1.0.
_MSCALE = 0.707


@dataclass(frozen=True)
class _Sizes:
    """The parameters of a named geometry; the first ``dense`` layers have no experts."""

    layers: int
    hidden: int
    heads: int
    mla: MlaGeometry
    inner: int
    dense: int
    experts: BothFeedForward | None
    vocab: int
    positions: int
    rope: Rope
    eps: float
    eos: int
    first_special: int


def _geometry(model_type: str, s: _Sizes, draft: DraftSizes) -> NamedGeometry:
    first = DenseFeedForward(inner=s.inner, activation=Swiglu())
    rest = first if s.experts is None else s.experts
    feed_forwards, of_layer = distinct_feed_forwards(
        [first] * s.dense + [rest] * (s.layers - s.dense)
    )
    target = TargetGeometry(
        model_type=model_type,
        layers=s.layers,
        hidden=s.hidden,
        vocab=s.vocab,
        q_heads=s.heads,
        kv_heads=1,
        head_dim=s.mla.entry_width,
        attention=AttentionParts(),
        norm=Norm(s.eps, "before_weight"),
        rope=s.rope,
        layer_types=("full_attention",) * s.layers,
        sliding_window=0,
        feed_forwards=feed_forwards,
        layer_feed_forwards=of_layer,
        max_positions=s.positions,
        # Youtu's head is tied, but a synthetic head must predict the next token.
        tied_head=False,
        eos_token_ids=(s.eos,),
        latent_dims=(s.mla.entry_width,) * s.layers,
        mla=s.mla,
    )
    return NamedGeometry(target, s.eos, s.first_special, draft)


def _mla(rank: int, rope: int, nope: int, value: int, query: int | None) -> MlaGeometry:
    scale = (nope + rope) ** -0.5
    return MlaGeometry(rank, rope, nope, value, scale, Norm(LATENT_EPS, "before_weight"), query)


def _experts(
    count: int, per_token: int, inner: int, *, shared: int, v2: bool, scaling: float
) -> BothFeedForward:
    moe = MoeFeedForward(
        experts=count,
        experts_per_token=per_token,
        inner=inner,
        storage="bf16",
        activation=Swiglu(),
        gating="softmax_topk" if v2 else "sigmoid_norm",
        choice_bias=not v2,
        group_score="max" if v2 else "sum_of_two",
        scaling=scaling,
    )
    return BothFeedForward(
        dense=DenseFeedForward(inner=shared * inner, activation=Swiglu()), moe=moe
    )


def _deepseek_v2_lite() -> NamedGeometry:
    yarn = YarnScaling(factor=40.0, original_max_positions=4096, truncate=True)
    stretched = yarn_attention_factor(40.0, _MSCALE) ** 2
    plain = _mla(512, 64, 128, 128, None)
    mla = MlaGeometry(**{**vars(plain), "scale": plain.scale * stretched})
    sizes = _Sizes(
        layers=27, hidden=2048, heads=16, mla=mla, inner=10944, dense=1,
        experts=_experts(64, 6, 1408, shared=2, v2=True, scaling=1.0),
        vocab=102400, positions=163840, rope=Rope(10000.0, yarn, None, True), eps=1e-6,
        eos=100001, first_special=100000,
    )  # fmt: skip
    return _geometry("deepseek_v2", sizes, DraftSizes(vocab=32000, inner=8192))


def _glm_47_flash() -> NamedGeometry:
    sizes = _Sizes(
        layers=47, hidden=2048, heads=20, mla=_mla(512, 64, 192, 256, 768), inner=10240, dense=1,
        experts=_experts(64, 4, 1536, shared=1, v2=False, scaling=1.8),
        vocab=154880, positions=202752, rope=Rope(1e6, None, None, True), eps=1e-5,
        eos=154820, first_special=154820,
    )  # fmt: skip
    return _geometry("glm4_moe_lite", sizes, DraftSizes(vocab=32000, inner=8192))


def _youtu_2b() -> NamedGeometry:
    sizes = _Sizes(
        layers=32, hidden=2048, heads=16, mla=_mla(512, 64, 128, 128, 1536), inner=6144, dense=32,
        experts=None, vocab=128256, positions=131072, rope=Rope(1.6e6, None, None, True),
        eps=1e-6, eos=128001, first_special=128000,
    )  # fmt: skip
    return _geometry("youtu", sizes, DraftSizes(vocab=32000, inner=6144))


def _tiny() -> NamedGeometry:
    sizes = _Sizes(
        layers=3, hidden=256, heads=4, mla=_mla(64, 32, 32, 64, 96), inner=512, dense=1,
        experts=_experts(16, 4, 64, shared=1, v2=False, scaling=1.8),
        vocab=4096, positions=4096, rope=Rope(10000.0, None, None, True), eps=1e-5,
        eos=4094, first_special=4093,
    )  # fmt: skip
    return _geometry("glm4_moe_lite", sizes, DraftSizes(vocab=1536, inner=512))


def target_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry, with the fields of the releases."""
    assert g.mla is not None
    dense = next(p for p in g.feed_forwards if isinstance(p, DenseFeedForward))
    scaling = rope_config(g.rope)
    if scaling is not None:
        scaling |= {"mscale": _MSCALE, "mscale_all_dim": _MSCALE}
    fields = {
        "architectures": [VARIANTS[g.model_type].architecture],
        "attention_bias": False,
        "eos_token_id": g.eos_token_ids[0],
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "intermediate_size": dense.inner,
        "kv_lora_rank": g.mla.kv_lora_rank,
        "max_position_embeddings": g.max_positions,
        "model_type": g.model_type,
        "num_attention_heads": g.q_heads,
        "num_hidden_layers": g.layers,
        "num_key_value_heads": g.q_heads,
        "pad_token_id": pad_token_id,
        "q_lora_rank": g.mla.q_lora_rank,
        "qk_nope_head_dim": g.mla.nope_dim,
        "qk_rope_head_dim": g.mla.rope_dim,
        "rms_norm_eps": g.norm.eps,
        "rope_scaling": scaling,
        "rope_theta": g.rope.theta,
        "tie_word_embeddings": g.tied_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": g.mla.v_dim,
        "vocab_size": g.vocab,
    }
    return fields | _expert_fields(g)


def _expert_fields(g: TargetGeometry) -> dict[str, Any]:
    variant = VARIANTS[g.model_type]
    if variant.dense_layers is None:
        return {}
    both = next((p for p in g.feed_forwards if isinstance(p, BothFeedForward)), None)
    if both is None:  # only the dense layers were kept
        return {"n_routed_experts": None}
    moe, v2 = both.moe, variant.scores == "softmax"
    return {
        "first_k_dense_replace": g.layer_feed_forwards.count(0),
        "moe_intermediate_size": moe.inner,
        "n_group": 1,
        "n_routed_experts": moe.experts,
        "n_shared_experts": both.dense.inner // moe.inner,
        "norm_topk_prob": not v2,
        "num_experts_per_tok": moe.experts_per_token,
        "routed_scaling_factor": moe.scaling,
        "topk_group": 1,
        "topk_method": "greedy" if v2 else "noaux_tc",
    }


def _tensor(fill: Fill, g: TargetGeometry, name: str, shape: tuple[int, ...]) -> SynthTensor:
    if name.endswith("e_score_correction_bias"):
        return fill.normal(name, shape, 0.0)
    return layer_tensor(fill, g, name, shape)


DEEPSEEK_SYNTH = SynthTarget(
    geometries={
        "deepseek-v2-lite": _deepseek_v2_lite,
        "glm-4.7-flash": _glm_47_flash,
        "youtu-2b": _youtu_2b,
        "tiny-mla": _tiny,
    },
    config=target_config,
    tensor=_tensor,
)
