"""The registry's entry for Gemma 4's assistants."""

from __future__ import annotations

from specbuild.builder.families.family import DraftFamily
from specbuild.builder.families.gemma4_assistant.checkpoint import (
    ARCHITECTURES,
    is_assistant,
    read_assistant,
)
from specbuild.builder.families.gemma4_assistant.cuda import ASSISTANT_CUDA
from specbuild.builder.families.gemma4_assistant.model import Assistant
from specbuild.builder.families.gemma4_assistant.reference import read_reference
from specbuild.builder.families.gemma4_assistant.synth import ASSISTANT_SYNTH
from specbuild.builder.families.parts.draft_modules import FinalNorm

ASSISTANT = DraftFamily(
    title="Gemma 4's assistant",
    architectures=ARCHITECTURES,
    read=read_assistant,
    hints=lambda _: [],
    fuse=FinalNorm,
    draft=Assistant,
    reference=read_reference,
    synth=ASSISTANT_SYNTH,
    claims=is_assistant,
    cuda=ASSISTANT_CUDA,
    refused_by=frozenset({"tensorrt", "tensorrt-rtx"}),
)
