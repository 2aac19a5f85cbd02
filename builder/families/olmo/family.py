"""The registry's entry for OLMo 2 and 3, and synthetic models of them."""

from __future__ import annotations

from typing import Any

from specbuild.builder.families.family import (
    CheckpointFormat,
    NamedGeometry,
    SynthTarget,
    TargetFamily,
)
from specbuild.builder.families.olmo.checkpoint import FORMS, read_config
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
from specbuild.runtime.engine_dir.geometry import AttentionParts, Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import YarnScaling

_MODEL_TYPES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
_VOCABULARY = Vocabulary(100278, 100256, (100257,), 100277)
_QK_NORMS = AttentionParts(qk_norm="all_heads")
_WINDOWS = ("sliding_attention",) * 3 + ("full_attention",)


def _olmo3(hidden: int, layers: int, heads: tuple[int, int], inner: int) -> GroupedSizes:
    """Return OLMo 3's sizes; only layers without a window have a scaled RoPE."""
    yarn = YarnScaling(
        factor=8.0, original_max_positions=8192, truncate=True, attention_factor=1.2079441541679836
    )
    return GroupedSizes(
        hidden=hidden, layers=layers, q_heads=heads[0], kv_heads=heads[1], head_dim=128,
        feed_forward=dense(inner), draft_inner=inner, vocabulary=_VOCABULARY, positions=65536,
        rope=Rope(5e5, yarn), eps=1e-6, attention=_QK_NORMS, layer_types=_WINDOWS, window=4096,
        rounding="after_weight",
    )  # fmt: skip


def _olmo2() -> GroupedSizes:
    return GroupedSizes(
        hidden=4096, layers=32, q_heads=32, kv_heads=32, head_dim=128, feed_forward=dense(11008),
        draft_inner=11008, vocabulary=_VOCABULARY, positions=4096, rope=Rope(5e5), eps=1e-6,
        attention=_QK_NORMS, rounding="after_weight",
    )  # fmt: skip


def _geometry(model_type: str, sizes: GroupedSizes) -> NamedGeometry:
    """Return the geometry, whose layers with a window have an unscaled RoPE."""
    changes: dict[str, Any] = {"norm_places": "outputs"}
    if sizes.rope.scaling is not None:
        changes["window_rope"] = Rope(sizes.rope.theta)
    return named(model_type, sizes, **changes)


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    fields: dict[str, Any] = {"attention_bias": False, "intermediate_size": dense_inner(g)}
    if g.model_type == "olmo3":
        fields |= {"layer_types": list(g.layer_types), "sliding_window": g.sliding_window}
    return fields


OLMO = TargetFamily(
    title="OLMo",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(read_config=read_config, tensors=grouped_tensors),
    module=GroupedModel,
    synth=SynthTarget(
        geometries={
            "olmo-2-7b": lambda: _geometry("olmo2", _olmo2()),
            "olmo-3-7b": lambda: _geometry("olmo3", _olmo3(4096, 32, (32, 32), 11008)),
            "olmo-3-32b": lambda: _geometry("olmo3", _olmo3(5120, 64, (40, 8), 27648)),
            "tiny-olmo3": lambda: _geometry(
                "olmo3",
                tiny_sizes(
                    dense(512),
                    attention=_QK_NORMS,
                    layer_types=_WINDOWS,
                    layers=4,
                    window=64,
                    rounding="after_weight",
                ),
            ),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
