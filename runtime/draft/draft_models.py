"""Which drafter runs an engine's draft model."""

from __future__ import annotations

from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.draft.eagle3 import Eagle3Drafter
from specbuild.runtime.draft.p_eagle import PEagleDrafter
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.executors.executor import Executor

# By the drafter's kind in the manifest; an MTP layer recurs as EAGLE3 does.
DRAFT_MODELS: dict[str, type[Eagle3Drafter]] = {
    "eagle3": Eagle3Drafter,
    "p-eagle": PEagleDrafter,
    "mtp": Eagle3Drafter,
}


def draft_model(executor: Executor, manifest: Manifest, counter: SlotCounter) -> Eagle3Drafter:
    """The drafter of the engine's first draft model."""
    return DRAFT_MODELS[manifest.drafters[0].kind](executor, manifest, counter)
