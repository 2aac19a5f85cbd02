"""The registry's entry for MiniMax-M2, and synthetic models of it."""

from __future__ import annotations

from typing import Any

from specbuild.builder.families.family import (
    CheckpointFormat,
    Reference,
    SynthTarget,
    TargetFamily,
)
from specbuild.builder.families.minimax_m2 import reference
from specbuild.builder.families.minimax_m2.checkpoint import (
    FORMS,
    canonical_tensors,
    read_config,
)
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import prepare_teacher
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    named,
    routed,
    tiny_sizes,
)
from specbuild.builder.families.parts.grouped_tensors import grouped_for_engine, grouped_tensors
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, Rope, TargetGeometry

_MODEL_TYPES = {"minimax_m2": "MiniMaxM2ForCausalLM"}
_VOCABULARY = Vocabulary(200064, 200000, (200020,), 200004)
_QK_NORMS = AttentionParts(qk_norm="all_heads")


def _experts(count: int, per_token: int, inner: int) -> MoeFeedForward:
    return routed(count, per_token, inner, gating="sigmoid_norm", choice_bias=True)


def _sizes() -> GroupedSizes:
    return GroupedSizes(
        hidden=3072, layers=62, q_heads=48, kv_heads=8, head_dim=128,
        feed_forward=_experts(256, 8, 1536), draft_inner=8192, vocabulary=_VOCABULARY,
        positions=196608, rope=Rope(5e6, width=64), eps=1e-6, attention=_QK_NORMS,
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    moe = g.feed_forward(0)
    assert isinstance(moe, MoeFeedForward)
    return {
        "intermediate_size": moe.inner,
        "num_experts_per_tok": moe.experts_per_token,
        "num_local_experts": moe.experts,
        "qk_norm_type": "per_layer",
        "rotary_dim": g.rope.width or g.head_dim,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


MINIMAX_M2 = TargetFamily(
    title="MiniMax-M2",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(
        read_config=read_config,
        tensors=grouped_tensors,
        canonical=canonical_tensors,
        for_engine=grouped_for_engine,
    ),
    module=GroupedModel,
    reference=Reference(
        load_options=reference.load_options,
        routers=reference.routers,
        margin=reference.routing_margin,
        stored_name=reference.stored_name,
    ),
    synth=SynthTarget(
        geometries={
            "minimax-m2": lambda: named("minimax_m2", _sizes()),
            "tiny-minimax-m2": lambda: named(
                "minimax_m2",
                tiny_sizes(_experts(16, 4, 64), attention=_QK_NORMS, rope=Rope(10000.0, width=32)),
            ),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
