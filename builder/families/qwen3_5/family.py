"""The registry's entry for Qwen3.5 and Qwen3-Next."""

from __future__ import annotations

from specbuild.builder.families.family import CheckpointFormat, Reference, TargetFamily
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_reference import (
    prepare_teacher,
    routers,
    routing_margin,
)
from specbuild.builder.families.qwen3_5 import gguf
from specbuild.builder.families.qwen3_5.checkpoint import (
    canonical_tensors,
    checkpoint_tensors,
    engine_tensors,
    read_config,
)
from specbuild.builder.families.qwen3_5.synth import ARCHITECTURES, QWEN3_5_SYNTH

QWEN3_5 = TargetFamily(
    title="Qwen3.5",
    model_types=ARCHITECTURES,
    checkpoint=CheckpointFormat(
        read_config=read_config,
        tensors=checkpoint_tensors,
        canonical=canonical_tensors,
        for_engine=engine_tensors,
    ),
    module=GroupedModel,
    reference=Reference(routers=routers, margin=routing_margin),
    synth=QWEN3_5_SYNTH,
    teacher=prepare_teacher,
    gguf=gguf.FORMS,
)
