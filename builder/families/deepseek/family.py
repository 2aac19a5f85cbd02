"""The registry's entry for models with DeepSeek's attention."""

from __future__ import annotations

from specbuild.builder.families.deepseek import checkpoint, gguf, hints, reference
from specbuild.builder.families.deepseek.model import DeepSeek
from specbuild.builder.families.deepseek.synth import DEEPSEEK_SYNTH
from specbuild.builder.families.deepseek.tensors import deepseek_tensors
from specbuild.builder.families.deepseek.variants import VARIANTS
from specbuild.builder.families.family import CheckpointFormat, Reference, TargetFamily
from specbuild.builder.families.parts.routing_margin import biased_choice_margin

DEEPSEEK = TargetFamily(
    title="DeepSeek-like",
    model_types={kind: variant.architecture for kind, variant in VARIANTS.items()},
    checkpoint=CheckpointFormat(
        read_config=checkpoint.read_deepseek_config,
        tensors=deepseek_tensors,
        for_engine=checkpoint.engine_tensors,
        hints=hints.feed_forward_hints,
        foreign_hints=hints.mla_hints,
    ),
    module=DeepSeek,
    reference=Reference(
        load_options=reference.load_options,
        routers=reference.routers,
        margin=biased_choice_margin,
    ),
    synth=DEEPSEEK_SYNTH,
    gguf={"deepseek2": gguf.FORM},
)
