"""The registry's entry for Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

from specbuild.builder.families.family import CheckpointFormat, Reference, TargetFamily
from specbuild.builder.families.mistral import checkpoint, gguf
from specbuild.builder.families.mistral.synth import MISTRAL_SYNTH, MODEL_TYPES
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import (
    mixtral_name,
    prepare_teacher,
    routers,
    routing_margin,
)
from specbuild.builder.families.parts.grouped_tensors import grouped_for_engine, grouped_tensors

MISTRAL = TargetFamily(
    title="Mistral",
    model_types=MODEL_TYPES,
    checkpoint=CheckpointFormat(
        read_config=checkpoint.read_config,
        tensors=grouped_tensors,
        canonical=checkpoint.canonical_tensors,
        for_engine=grouped_for_engine,
    ),
    module=GroupedModel,
    reference=Reference(routers=routers, margin=routing_margin, stored_name=mixtral_name),
    synth=MISTRAL_SYNTH,
    teacher=prepare_teacher,
    gguf=gguf.FORMS,
)
