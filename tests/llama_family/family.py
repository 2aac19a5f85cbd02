"""LLaMA as the registry knows it."""

from __future__ import annotations

from llama_family.checkpoint import read_config
from llama_family.model import Llama
from llama_family.tensors import llama_tensors
from specbuild.builder.families.family import CheckpointFormat, TargetFamily

LLAMA = TargetFamily(
    title="LLaMA",
    model_types={"llama": "LlamaForCausalLM"},
    checkpoint=CheckpointFormat(read_config=read_config, tensors=llama_tensors),
    module=Llama,
)
