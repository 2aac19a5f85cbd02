"""The registry's entry for GPT-OSS."""

from __future__ import annotations

from specbuild.builder.families.family import CheckpointFormat, Reference, TargetFamily
from specbuild.builder.families.gpt_oss import checkpoint, gguf, hints, reference
from specbuild.builder.families.gpt_oss.model import GptOss
from specbuild.builder.families.gpt_oss.streamed_layer import StreamedLayer
from specbuild.builder.families.gpt_oss.synth import GPT_OSS_SYNTH
from specbuild.builder.families.gpt_oss.teacher import prepare_teacher
from specbuild.builder.families.gpt_oss.tensors import target_tensors

GPT_OSS = TargetFamily(
    title="GPT-OSS",
    model_types={"gpt_oss": "GptOssForCausalLM"},
    checkpoint=CheckpointFormat(
        read_config=checkpoint.read_gpt_oss_config,
        tensors=target_tensors,
        canonical=checkpoint.canonical_tensors,
        claims=checkpoint.is_original,
        text_roots=checkpoint.text_roots,
        hints=hints.mismatch_hints,
        foreign_hints=hints.experts_hints,
    ),
    module=GptOss,
    reference=Reference(
        load_options=reference.load_options,
        routers=reference.routers,
        margin=reference.routing_margin,
    ),
    synth=GPT_OSS_SYNTH,
    retrofit=StreamedLayer,
    teacher=prepare_teacher,
    gguf={"gpt-oss": gguf.FORM},
)
