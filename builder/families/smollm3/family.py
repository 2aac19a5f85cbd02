"""The registry's entry for SmolLM3, and synthetic models of it."""

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
from specbuild.builder.families.smollm3.checkpoint import FORMS, read_config
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry

_MODEL_TYPES = {"smollm3": "SmolLM3ForCausalLM"}
_VOCABULARY = Vocabulary(128256, 128000, (128012, 128001), 128004)


def _sizes() -> GroupedSizes:
    return GroupedSizes(
        hidden=2048, layers=36, q_heads=16, kv_heads=4, head_dim=128, feed_forward=dense(11008),
        draft_inner=11008, vocabulary=_VOCABULARY, positions=65536, rope=Rope(5e6), eps=1e-6,
    )  # fmt: skip


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "intermediate_size": dense_inner(g),
        "no_rope_layers": [int(layer not in g.unrotated_layers) for layer in range(g.layers)],
        "use_sliding_window": False,
    }


SMOLLM3 = TargetFamily(
    title="SmolLM3",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(read_config=read_config, tensors=grouped_tensors),
    module=GroupedModel,
    synth=SynthTarget(
        geometries={
            "smollm3-3b": lambda: named(
                "smollm3", _sizes(), unrotated_layers=tuple(range(3, 36, 4))
            ),
            "tiny-smollm3": lambda: named("smollm3", tiny_sizes(dense(512)), unrotated_layers=(1,)),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
