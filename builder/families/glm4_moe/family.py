"""The registry's entry for GLM-4.5 to 4.7, and synthetic models of them."""

from __future__ import annotations

from functools import partial
from typing import Any

from specbuild.builder.families.family import (
    CheckpointFormat,
    Reference,
    SynthTarget,
    TargetFamily,
)
from specbuild.builder.families.glm4_moe.checkpoint import FORMS, read_config
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import (
    prepare_teacher,
    routers,
)
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    dense,
    named,
    routed,
    tiny_sizes,
)
from specbuild.builder.families.parts.grouped_tensors import grouped_for_engine, grouped_tensors
from specbuild.builder.families.parts.mla_layer import feed_forward_module
from specbuild.builder.families.parts.routing_margin import biased_choice_margin
from specbuild.runtime.engine_dir.feed_forward import BothFeedForward, DenseFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Rope, TargetGeometry

_MODEL_TYPES = {"glm4_moe": "Glm4MoeForCausalLM"}
_VOCABULARY = Vocabulary(151552, 151329, (151329, 151336, 151338), 151329)
_QKV_BIASES = AttentionParts(qkv_bias=True)


def _experts(count: int, per_token: int, inner: int, scaling: float = 1.0) -> BothFeedForward:
    """Return routed experts, and a shared one of the same width."""
    moe = routed(count, per_token, inner, gating="sigmoid_norm", choice_bias=True, scaling=scaling)
    return BothFeedForward(dense=dense(inner), moe=moe)


def _air() -> GroupedSizes:
    return GroupedSizes(
        hidden=4096, layers=46, q_heads=96, kv_heads=8, head_dim=128,
        feed_forward=_experts(128, 8, 1408), first_layers=(dense(10944),), draft_inner=10944,
        vocabulary=_VOCABULARY, positions=131072, rope=Rope(1e6, width=64), eps=1e-5,
        attention=_QKV_BIASES,
    )  # fmt: skip


def _large() -> GroupedSizes:
    return GroupedSizes(
        hidden=5120, layers=92, q_heads=96, kv_heads=8, head_dim=128,
        feed_forward=_experts(160, 8, 1536, 2.5), first_layers=(dense(12288),) * 3,
        draft_inner=12288, vocabulary=_VOCABULARY, positions=131072, rope=Rope(1e6, width=64),
        eps=1e-5, attention=AttentionParts(qkv_bias=True, qk_norm="head"),
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    kinds = [g.feed_forward(layer) for layer in range(g.layers)]
    first = [kind for kind in kinds if isinstance(kind, DenseFeedForward)]
    fields: dict[str, Any] = {
        "attention_bias": g.attention.qkv_bias,
        "first_k_dense_replace": len(first),
        "partial_rotary_factor": (g.rope.width or g.head_dim) / g.head_dim,
        "use_qk_norm": g.attention.qk_norm == "head",
    }
    both = next((kind for kind in kinds if isinstance(kind, BothFeedForward)), None)
    fields["intermediate_size"] = first[0].inner if first else g.hidden
    # A config must have experts, even if only the dense layers were kept.
    moe = both.moe if both is not None else routed(1, 1, 1)
    return fields | {
        "moe_intermediate_size": moe.inner,
        "n_group": moe.groups,
        "n_routed_experts": moe.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": moe.experts_per_token,
        "routed_scaling_factor": moe.scaling,
        "topk_group": moe.groups_chosen,
    }


GLM4_MOE = TargetFamily(
    title="GLM-4.5",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(
        read_config=read_config, tensors=grouped_tensors, for_engine=grouped_for_engine
    ),
    module=partial(GroupedModel, mlp=feed_forward_module),
    reference=Reference(routers=routers, margin=biased_choice_margin),
    synth=SynthTarget(
        geometries={
            "glm-4.5-air": lambda: named("glm4_moe", _air()),
            "glm-4.6": lambda: named("glm4_moe", _large()),
            "tiny-glm4-moe": lambda: named(
                "glm4_moe",
                tiny_sizes(
                    _experts(16, 4, 64),
                    first_layers=(dense(512),),
                    attention=_QKV_BIASES,
                    rope=Rope(10000.0, width=32),
                ),
            ),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
