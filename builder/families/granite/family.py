"""The registry's entry for Granite, and synthetic models of it."""

from __future__ import annotations

from typing import Any

from specbuild.builder.families.family import CheckpointFormat, SynthTarget, TargetFamily
from specbuild.builder.families.granite.checkpoint import FORMS, read_config
from specbuild.builder.families.parts.grouped_config import dense_inner
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import prepare_teacher
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    dense,
    named,
    tiny_sizes,
)
from specbuild.builder.families.parts.grouped_tensors import grouped_tensors
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    Multipliers,
    Rope,
    TargetGeometry,
)

_MODEL_TYPES = {"granite": "GraniteForCausalLM"}
_VOCABULARY = Vocabulary(49155, 49152, (0,), 0)
_FACTORS = Multipliers(embedding=12.0, residual=0.22, logits_divisor=16.0)


def _sizes() -> GroupedSizes:
    return GroupedSizes(
        hidden=4096, layers=40, q_heads=32, kv_heads=8, head_dim=128, feed_forward=dense(12800),
        draft_inner=12800, vocabulary=_VOCABULARY, positions=131072, rope=Rope(1e7), eps=1e-5,
        attention=AttentionParts(scale=0.0078125),
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    factors = g.multipliers
    assert factors is not None
    return {
        "attention_bias": False,
        "attention_multiplier": g.attention.scale,
        "embedding_multiplier": factors.embedding,
        "intermediate_size": dense_inner(g),
        "logits_scaling": factors.logits_divisor,
        "residual_multiplier": factors.residual,
    }


GRANITE = TargetFamily(
    title="Granite",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(read_config=read_config, tensors=grouped_tensors),
    module=GroupedModel,
    synth=SynthTarget(
        geometries={
            "granite-3.3-8b": lambda: named("granite", _sizes(), multipliers=_FACTORS),
            "tiny-granite": lambda: named(
                "granite",
                tiny_sizes(dense(512), attention=AttentionParts(scale=0.03)),
                multipliers=_FACTORS,
            ),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
