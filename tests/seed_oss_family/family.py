"""Seed-OSS as the registry knows it."""

from __future__ import annotations

from seed_oss_family.checkpoint import read_config
from specbuild.builder.families.family import CheckpointFormat, TargetFamily
from specbuild.builder.families.parts.grouped_model import GroupedModel
from specbuild.builder.families.parts.grouped_tensors import grouped_tensors

SEED_OSS = TargetFamily(
    title="Seed-OSS",
    model_types={"seed_oss": "SeedOssForCausalLM"},
    checkpoint=CheckpointFormat(read_config=read_config, tensors=grouped_tensors),
    module=GroupedModel,
)
