"""The registry's entry for Gemma 4."""

from __future__ import annotations

from specbuild.builder.families.family import (
    CheckpointFormat,
    Reference,
    SynthTarget,
    TargetFamily,
)
from specbuild.builder.families.gemma4.checkpoint import UNIFIED, read_config
from specbuild.builder.families.gemma4.gguf import FORMS
from specbuild.builder.families.gemma4.model import Gemma4Model
from specbuild.builder.families.gemma4.reference import prepare_teacher, routers, routing_margin
from specbuild.builder.families.gemma4.synth import GEOMETRIES, config, router_logits, tensor
from specbuild.builder.families.gemma4.tensors import canonical, for_engine, gemma4_tensors

GEMMA4 = TargetFamily(
    title="Gemma 4",
    model_types={"gemma4_text": "Gemma4ForCausalLM", UNIFIED: "Gemma4UnifiedForCausalLM"},
    checkpoint=CheckpointFormat(
        read_config=read_config,
        tensors=gemma4_tensors,
        canonical=canonical,
        for_engine=for_engine,
    ),
    module=Gemma4Model,
    reference=Reference(routers=routers, margin=routing_margin),
    synth=SynthTarget(
        geometries=GEOMETRIES, config=config, tensor=tensor, router_logits=router_logits
    ),
    teacher=prepare_teacher,
    gguf=FORMS,
)
