"""The registry's entry for Phi-3 and Phi-4, and synthetic models of them."""

from __future__ import annotations

from typing import Any

from specbuild.builder.families.family import CheckpointFormat, SynthTarget, TargetFamily
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
from specbuild.builder.families.phi3.checkpoint import FORMS, canonical_tensors, read_config
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry

_MODEL_TYPES = {"phi3": "Phi3ForCausalLM"}
_VOCABULARY = Vocabulary(100352, 100256, (100257, 100265), 100349)


def _sizes() -> GroupedSizes:
    return GroupedSizes(
        hidden=5120, layers=40, q_heads=40, kv_heads=10, head_dim=128, feed_forward=dense(17920),
        draft_inner=17920, vocabulary=_VOCABULARY, positions=16384, rope=Rope(250000.0), eps=1e-5,
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    return {
        "intermediate_size": dense_inner(g),
        "partial_rotary_factor": (g.rope.width or g.head_dim) / g.head_dim,
        "sliding_window": g.sliding_window or None,
    }


PHI3 = TargetFamily(
    title="Phi",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(
        read_config=read_config, tensors=grouped_tensors, canonical=canonical_tensors
    ),
    module=GroupedModel,
    synth=SynthTarget(
        geometries={
            "phi-4": lambda: named("phi3", _sizes()),
            "tiny-phi3": lambda: named(
                "phi3", tiny_sizes(dense(512), rope=Rope(10000.0, width=48))
            ),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
