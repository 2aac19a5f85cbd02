"""The registry's entry for Gemma 3's text model, and synthetic models of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from specbuild.builder.families.family import (
    CheckpointFormat,
    NamedGeometry,
    SynthTarget,
    TargetFamily,
)
from specbuild.builder.families.gemma3.checkpoint import FORMS, engine_tensors, read_config
from specbuild.builder.families.parts.grouped_config import dense_inner
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import prepare_teacher
from specbuild.builder.families.parts.grouped_synth import (
    GroupedSizes,
    Vocabulary,
    config_writer,
    named,
    tiny_sizes,
)
from specbuild.builder.families.parts.grouped_tensors import grouped_tensors
from specbuild.builder.families.parts.synth_layer import layer_tensor
from specbuild.builder.synth.fill import Fill
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward, Geglu
from specbuild.runtime.engine_dir.geometry import (
    AttentionParts,
    Multipliers,
    Rope,
    TargetGeometry,
)
from specbuild.runtime.engine_dir.rope_scaling import LinearScaling

_NORMS_LESS = 1.0
_MODEL_TYPES = {"gemma3_text": "Gemma3ForCausalLM"}
_VOCABULARY = Vocabulary(262208, 262144, (1, 106), 0)
_WINDOWS = ("sliding_attention",) * 5 + ("full_attention",)


def _geglu(inner: int) -> DenseFeedForward:
    return DenseFeedForward(inner=inner, activation=Geglu())


def _attention(scalar: int) -> AttentionParts:
    return AttentionParts(qk_norm="head", scale=scalar**-0.5)


def _27b() -> GroupedSizes:
    return GroupedSizes(
        hidden=5376, layers=62, q_heads=32, kv_heads=16, head_dim=128, feed_forward=_geglu(21504),
        draft_inner=21504, vocabulary=_VOCABULARY, positions=131072,
        rope=Rope(1e6, LinearScaling(factor=8.0)), eps=1e-6, attention=_attention(168),
        layer_types=_WINDOWS, window=1024, rounding="after_weight",
    )  # fmt: skip


def _12b() -> GroupedSizes:
    return replace(
        _27b(), hidden=3840, layers=48, q_heads=16, kv_heads=8, head_dim=256,
        feed_forward=_geglu(15360), draft_inner=15360, attention=_attention(256),
    )  # fmt: skip


def _tiny() -> GroupedSizes:
    return tiny_sizes(
        _geglu(512), layers=6, attention=_attention(64), layer_types=_WINDOWS, window=64,
        rope=Rope(1e6), rounding="after_weight",
    )  # fmt: skip


def _geometry(sizes: GroupedSizes) -> NamedGeometry:
    return named(
        "gemma3_text",
        sizes,
        norm_places="both",
        window_rope=Rope(10000.0),
        multipliers=Multipliers(embedding=math.sqrt(sizes.hidden)),
    )


def _family_fields(g: TargetGeometry) -> dict[str, Any]:
    assert g.attention.scale is not None
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": dense_inner(g),
        "layer_types": list(g.layer_types),
        "query_pre_attn_scalar": round(g.attention.scale**-2),
        "rope_local_base_freq": 10000.0,
        "sliding_window": g.sliding_window or None,
    }


def _tensor(fill: Fill, g: TargetGeometry, name: str, shape: tuple[int, ...]) -> SynthTensor:
    """Return a tensor like that of other layers, with norm weights minus 1."""
    return layer_tensor(fill, g, name, shape, norms_less=_NORMS_LESS)


GEMMA3 = TargetFamily(
    title="Gemma 3",
    model_types=_MODEL_TYPES,
    checkpoint=CheckpointFormat(
        read_config=read_config, tensors=grouped_tensors, for_engine=engine_tensors
    ),
    module=GroupedModel,
    synth=SynthTarget(
        geometries={
            "gemma-3-27b": lambda: _geometry(_27b()),
            "gemma-3-12b": lambda: _geometry(_12b()),
            "tiny-gemma3": lambda: _geometry(_tiny()),
        },
        config=config_writer(_MODEL_TYPES, _family_fields),
        tensor=_tensor,
        norms_less=_NORMS_LESS,
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
