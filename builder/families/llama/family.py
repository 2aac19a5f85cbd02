"""Llama, Qwen2, Qwen3, Qwen3-MoE and MiMo as the registry knows them."""

from __future__ import annotations

from specbuild.builder.families.family import CheckpointFormat, Reference, TargetFamily
from specbuild.builder.families.llama import checkpoint, gguf, hints, reference
from specbuild.builder.families.llama.model import Llama
from specbuild.builder.families.llama.synth import LLAMA_SYNTH
from specbuild.builder.families.llama.tensors import llama_tensors

LLAMA = TargetFamily(
    title="Llama",
    model_types={
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mimo": "MiMoForCausalLM",
    },
    checkpoint=CheckpointFormat(
        read_config=checkpoint.read_config,
        tensors=llama_tensors,
        canonical=checkpoint.without_tables,
        for_engine=checkpoint.engine_tensors,
        hints=hints.mismatch_hints,
    ),
    module=Llama,
    reference=Reference(
        classes=reference.CLASSES,
        load_options=reference.load_options,
        routers=reference.routers,
        margin=reference.routing_margin,
    ),
    synth=LLAMA_SYNTH,
    gguf=gguf.FORMS,
)
