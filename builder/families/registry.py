"""The registry of families. A new family is a folder alongside this file and a line here."""

from __future__ import annotations

from specbuild.builder.checkpoint.gguf.form import GgufForm
from specbuild.builder.families.deepseek.family import DEEPSEEK
from specbuild.builder.families.dflash.family import DFLASH
from specbuild.builder.families.eagle3.family import EAGLE3
from specbuild.builder.families.family import DraftFamily, SynthDraft, TargetFamily
from specbuild.builder.families.gemma3.family import GEMMA3
from specbuild.builder.families.gemma4.family import GEMMA4
from specbuild.builder.families.gemma4_assistant.family import ASSISTANT
from specbuild.builder.families.glm4_moe.family import GLM4_MOE
from specbuild.builder.families.gpt_oss.family import GPT_OSS
from specbuild.builder.families.granite.family import GRANITE
from specbuild.builder.families.llama.family import LLAMA
from specbuild.builder.families.minimax_m2.family import MINIMAX_M2
from specbuild.builder.families.mistral.family import MISTRAL
from specbuild.builder.families.mtp.family import MTP
from specbuild.builder.families.olmo.family import OLMO
from specbuild.builder.families.p_eagle.family import P_EAGLE
from specbuild.builder.families.phi3.family import PHI3
from specbuild.builder.families.qwen3_5.family import QWEN3_5
from specbuild.builder.families.smollm3.family import SMOLLM3
from specbuild.runtime.errors import SpecbuildError

TARGETS: dict[str, TargetFamily] = {
    "gpt_oss": GPT_OSS,
    "deepseek": DEEPSEEK,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "smollm3": SMOLLM3,
    "phi3": PHI3,
    "olmo": OLMO,
    "granite": GRANITE,
    "glm4_moe": GLM4_MOE,
    "minimax_m2": MINIMAX_M2,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "qwen3_5": QWEN3_5,
}
DRAFTS: dict[str, DraftFamily] = {
    "eagle3": EAGLE3,
    "p_eagle": P_EAGLE,
    "dflash": DFLASH,
    "mtp": MTP,
    "gemma4_assistant": ASSISTANT,
}


def target_family(model_type: str) -> TargetFamily:
    """Return the family of an engine's target.

    Raises SpecbuildError for a model type of another version.
    """
    for family in TARGETS.values():
        if model_type in family.model_types:
            return family
    raise SpecbuildError(
        f"model_type {model_type!r} is not supported (supported: {supported_targets()})"
    )


def synth_draft(kind: str) -> SynthDraft:
    """Return the synthetic drafts of a kind, spelled as in a manifest."""
    draft = DRAFTS[kind.replace("-", "_")].synth
    assert draft is not None
    return draft


def draft_family(architecture: str) -> DraftFamily:
    """Return the family of a draft. SpecbuildError for an unsupported architecture."""
    for family in DRAFTS.values():
        if architecture in family.architectures:
            return family
    supported = ", ".join(name for family in DRAFTS.values() for name in family.architectures)
    raise SpecbuildError(f"the draft's architecture: got {architecture!r}, expected {supported}")


def gguf_forms() -> dict[str, GgufForm]:
    """Return the readers of GGUF files by architecture."""
    return {name: form for family in TARGETS.values() for name, form in family.gguf.items()}


def supported_targets() -> str:
    """Return every model type with its architecture, for error messages."""
    return ", ".join(
        f"{kind} ({architecture})"
        for family in TARGETS.values()
        for kind, architecture in family.model_types.items()
    )


def retrofit_targets() -> str:
    """Return the model types that support latents and indexers, for error messages."""
    return " and ".join(
        kind for family in TARGETS.values() if family.retrofits for kind in family.model_types
    )
