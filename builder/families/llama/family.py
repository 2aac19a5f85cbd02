"""The registry's entry for Llama, Qwen2, Qwen3, Qwen3-MoE, MiMo and Qwen3-VL's text model."""

from __future__ import annotations

from specbuild.builder.families.family import CheckpointFormat, Reference, TargetFamily
from specbuild.builder.families.llama import checkpoint, gguf, hints, reference
from specbuild.builder.families.llama.synth import LLAMA_SYNTH
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import (
    prepare_teacher,
    routers,
    routing_margin,
)
from specbuild.builder.families.parts.grouped_tensors import grouped_for_engine, grouped_tensors

LLAMA = TargetFamily(
    title="Llama",
    model_types={
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mimo": "MiMoForCausalLM",
        "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    },
    checkpoint=CheckpointFormat(
        read_config=checkpoint.read_config,
        tensors=grouped_tensors,
        canonical=checkpoint.without_tables,
        for_engine=grouped_for_engine,
        hints=hints.mismatch_hints,
    ),
    module=GroupedModel,
    reference=Reference(
        classes=reference.CLASSES,
        load_options=reference.load_options,
        routers=routers,
        margin=routing_margin,
    ),
    synth=LLAMA_SYNTH,
    teacher=prepare_teacher,
    gguf=gguf.FORMS,
)
