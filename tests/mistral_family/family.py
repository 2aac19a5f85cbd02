"""Mistral as the registry knows it."""

from __future__ import annotations

from mistral_family.checkpoint import read_config
from mistral_family.model import Mistral
from mistral_family.tensors import mistral_tensors
from specbuild.builder.families.family import CheckpointFormat, TargetFamily

MISTRAL = TargetFamily(
    title="Mistral",
    model_types={"mistral": "MistralForCausalLM"},
    checkpoint=CheckpointFormat(read_config=read_config, tensors=mistral_tensors),
    module=Mistral,
)
